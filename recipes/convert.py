"""Convert a checkpoint to another format, file size or dtype: rank files to a model directory, and back."""

import dataclasses

import fsdp_shard as fs


@fs.recipe(fs.ConvertConfig, check=fs.check_conversion)
def main(config: fs.ConvertConfig) -> None:
    """Convert `source` into the directory `target`, and push it to the hub if `push_to` is set."""
    report = fs.run_conversion(config)
    print(report.describe(config.target))
    pushed = fs.push_converted(config, report)
    fs.write_result(config.run_dir, dataclasses.asdict(report) | pushed)


if __name__ == "__main__":
    main()
