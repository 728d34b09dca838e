"""Checks of a checkpoint and of `generate` that need no torch, so that mistakes are reported at once."""

from fsdp_shard.checkpoint import Location, check_loadable, check_unmerged
from fsdp_shard.distributed import LaunchConfig, shares_memory, world_sizes
from fsdp_shard.errors import CheckpointError, ConfigError
from fsdp_shard.inference.config import GenerateSettings
from fsdp_shard.inference.generation.completions_file import open_completions
from fsdp_shard.inference.generation.prompts import check_standard_input, read_prompts
from fsdp_shard.models import check_model_config
from fsdp_shard.utils import check, refuse_changed


def check_checkpoint(source: Location) -> None:
    """Raise CheckpointError or ModelError unless `source` has weights with readable headers, and a config.

    Example:
        >>> fs.check_checkpoint(config.source)  # doctest: +SKIP
    """
    check_loadable(source.model_index)
    check_model_config(source.config_directory)


def check_generation(settings: GenerateSettings, launch: LaunchConfig, run_dir: str | None, seed: int) -> None:
    """Check the settings, the prompts, the output file and the number of ranks.

    Args:
        settings: The settings of `generate`.
        launch: Number of ranks, and how they are started.
        run_dir: Directory of the output, unless `settings.output` names a file; None to keep none.
        seed: Seed of sampling; an output file with another seed is not resumed.

    Raises:
        ConfigError: A setting is wrong or does not suit the number of ranks, or scores would not be written anywhere.
        DataError: Prompts cannot be read, or the output file cannot be used.

    Example:
        >>> fs.check_generation(config, config.launch, config.kept_run_dir, config.seed)  # doctest: +SKIP
    """
    check(settings)
    num_ranks = max(world_sizes(launch))
    if run_dir is None and settings.output is None and not settings.is_conversation:
        why = "has no effect: scores are written to a file, and this run only prints; add output=FILE.jsonl or run_dir."
        refuse_changed(settings.generation, ["output_scores"], "generation.", why)
    for name, location in settings.adapter_sources.items():
        try:
            check_unmerged(location.index, settings.source.index, settings.source.expected_config_directory)
        except CheckpointError as error:
            raise CheckpointError(f"adapters.{name}: {error}") from error
    check_standard_input(settings, is_shared=num_ranks > 1 and not shares_memory(launch))
    if not settings.is_conversation:
        open_completions(settings, run_dir, read_prompts(settings), seed)
    elif num_ranks > 1:
        raise ConfigError("launch.ranks divides prompts among ranks, and a conversation has none; remove it.")
    if any(ranks % settings.tensor_parallel for ranks in world_sizes(launch)):
        raise ConfigError(
            f"tensor_parallel={settings.tensor_parallel} needs that many ranks or a multiple, and launch.ranks gives "
            f"{num_ranks}; give launch.ranks={settings.tensor_parallel}."
        )
