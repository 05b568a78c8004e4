"""The nets of ``nets.py`` in torch: as many parameters, the same optimizers; pictures have their channels first."""

import torch
from rows import LENGTH, WORDS, WORDS_OF_REUTERS
from torch import nn

WIDTH, HEADS, INNER, BLOCKS, DROPOUT = 128, 4, 512, 2, 0.1  # of the transformer


def build(net):
    """A module, and what makes its optimizer from its parameters."""
    torch.manual_seed(0)
    make, optimizer = NETS[net]
    return make(), optimizer


class Transposed(nn.Module):
    """Positions and channels change places."""

    def forward(self, x):
        """From (rows, positions, channels) to (rows, channels, positions)."""
        return x.transpose(1, 2)


def reuters():
    return nn.Sequential(
        nn.Embedding(WORDS_OF_REUTERS, 7),
        Transposed(),
        nn.Conv1d(7, 64, 5),
        nn.ReLU(),
        nn.MaxPool1d(2),
        nn.Conv1d(64, 32, 3),
        nn.ReLU(),
        nn.MaxPool1d(2),
        nn.Flatten(),
        nn.Linear(2336, 46),
    )


def mnist():
    return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def cifar():
    def block(before, filters):
        first, second = nn.Conv2d(before, filters, 3, padding=1), nn.Conv2d(filters, filters, 3)
        return [first, nn.ReLU(), second, nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25)]

    top = [nn.Flatten(), nn.Linear(2304, 512), nn.ReLU(), nn.Dropout(0.5), nn.Linear(512, 10)]
    return nn.Sequential(*block(3, 32), *block(32, 64), *top)


# --- MobileNetV2 (Sandler et al., 2018, table 2), with the momentum and epsilon of Keras ------------------------------

# Expansion, channels, blocks, stride of the first block.
STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def convolution(before, channels, size, stride=1, groups=1, activation=True):
    parts = [
        nn.Conv2d(before, channels, size, stride, padding=size // 2, groups=groups, bias=False),
        nn.BatchNorm2d(channels, eps=1e-3, momentum=1e-3),
    ]
    return [*parts, nn.ReLU6()] if activation else parts


class InvertedResidual(nn.Module):
    """Widens, filters each channel by itself, narrows; adds its input where shapes are the same."""

    def __init__(self, before, channels, stride, expansion):
        super().__init__()
        wide = before * expansion
        self.parts = nn.Sequential(
            *(convolution(before, wide, 1) if expansion > 1 else []),
            *convolution(wide, wide, 3, stride, groups=wide),
            *convolution(wide, channels, 1, activation=False),
        )
        self.is_residual = stride == 1 and before == channels

    def forward(self, x):
        """Pictures with as many rows."""
        return x + self.parts(x) if self.is_residual else self.parts(x)


def mobilenet():
    parts, before = convolution(3, 32, 3, stride=2), 32
    for expansion, channels, blocks, stride in STAGES:
        for number in range(blocks):
            parts.append(InvertedResidual(before, channels, 1 if number else stride, expansion))
            before = channels
    return nn.Sequential(
        *parts, *convolution(before, 1280, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, 2)
    )


# --- the transformer --------------------------------------------------------------------------------------------------


class Transformer(nn.Module):
    """Blocks over embedded tokens with learned positions, their mean, and a layer for the classes."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Parameter(nn.init.xavier_uniform_(torch.empty(LENGTH, WIDTH)))
        self.dropout = nn.Dropout(DROPOUT)
        blocks = [
            nn.TransformerEncoderLayer(WIDTH, HEADS, INNER, DROPOUT, layer_norm_eps=1e-3, batch_first=True)
            for _ in range(BLOCKS)
        ]
        self.blocks = nn.Sequential(*blocks)
        self.classes = nn.Linear(WIDTH, 2)

    def forward(self, tokens):
        """Logits."""
        x = self.blocks(self.dropout(self.tokens(tokens) + self.positions))
        return self.classes(x.mean(1))


NETS = {
    "reuters": (reuters, lambda parameters: torch.optim.NAdam(parameters, 1e-3)),
    "mnist": (mnist, torch.optim.Adam),
    "cifar": (cifar, lambda parameters: torch.optim.RMSprop(parameters, 1e-3)),
    "mobilenet": (mobilenet, torch.optim.Adam),
    "transformer": (Transformer, torch.optim.Adam),
}
