"""A worker that fine-tunes Gemma, and writes it in each way to a folder of its own, as if it were the chief."""

from pathlib import Path

from tests.distributed.jobs.program import config, make_strategy, tell
from tests.hub.kit import named, train

folder = Path(config["written"]) / f"worker{config['index']}"
folder.mkdir()
strategy = make_strategy()
model = train(named("gemma"), strategy, lambda model: model.backbone.enable_lora(4) if config["lora"] else None)
if config["lora"]:
    model.backbone.save_lora_weights(folder / "adapters.lora.h5")
else:
    model.save_to_preset(folder / "preset")
    model.export_to_transformers(folder / "transformers")
    model.backbone.save_to_preset(folder / "backbone")
    model.save_weights(folder / "model.weights.h5")
tell(values=[float(variable.value.sum()) for variable in model.weights])
