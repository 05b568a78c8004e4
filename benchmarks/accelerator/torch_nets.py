"""The nets of ``nets.py`` in torch, with as many parameters, and batches of the same shapes."""

import torch
from torch import nn
from torch.nn import functional


def dense(width=256):
    """A multilayer perceptron on images of digits."""
    return nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


class Block(nn.Module):
    """Attention to earlier positions, and two layers, each on normalized values and added."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width, eps=1e-3), nn.LayerNorm(width, eps=1e-3)
        self.projected, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        """Values (rows, positions, width)."""
        rows, length, width = x.shape
        split = self.projected(self.before(x)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).reshape(rows, length, width))
        return x + self.inner(self.between(x))


def language(words=50_257, width=512, blocks=4, heads=8):
    """A decoder of transformer blocks."""
    inner = [Block(width, heads) for _ in range(blocks)]
    return nn.Sequential(
        nn.Embedding(words, width), *inner, nn.LayerNorm(width, eps=1e-3), nn.Linear(width, words, bias=False)
    )


def residual():
    """ResNet50, channels last in memory, as XLA chooses."""
    from torchvision.models import resnet50

    return resnet50(weights=None).to(memory_format=torch.channels_last)


def _tokens(rows, words=50_257, length=512):
    drawn = torch.randint(0, words, (rows, length + 1))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def _pictures(rows):
    pictures = torch.randn(rows, 3, 224, 224).to(memory_format=torch.channels_last)
    return pictures, torch.randint(0, 1000, (rows,))


NETS = {
    "MLP": (dense, lambda rows: (torch.randn(rows, 784), torch.randint(0, 10, (rows,)))),
    "LM": (language, _tokens),
    "ResNet50": (residual, _pictures),
}
