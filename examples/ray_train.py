"""Fine-tune a model on two Ray Train workers, which continue from the last step if a worker is lost.

python examples/ray_train.py runs/ray MODEL_DIRECTORY TEXT_FILE [SETTING...]

A restart continues as well. `fsdp-shard generate checkpoint=runs/ray/run prompt=...` generates text.
"""

import json
import sys
from pathlib import Path

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from fsdp_shard.integrations import ray_finetune


def main(storage: str, model: str, text: str, *settings: str) -> None:
    """Run finetune on two workers."""
    paths = {"model.path": model, "data.path": text, "run_dir": f"{storage}/run"}
    given = [f"{name}={Path(path).resolve()}" for name, path in paths.items()]
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20)
    trainer = TorchTrainer(
        ray_finetune,
        train_loop_config={"settings": [*given, "train.steps=20", "checkpoint.every=5", *settings]},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="ray", storage_path=str(Path(storage).resolve()), failure_config=FailureConfig(max_failures=1)
        ),
    )
    result = trainer.fit()
    assert result.metrics is not None
    assert result.checkpoint is not None
    print(json.dumps({"final_loss": result.metrics["final_loss"], "checkpoint": result.checkpoint.path}))


if __name__ == "__main__":
    main(*sys.argv[1:])
