"""mlxdet audit."""

from typing import Any

import click

from mlxdet.cli.options import SectionedCommand, build_config, common, config_options, given, print_json


@click.command(cls=SectionedCommand)
@click.argument("function", metavar="[MODULE:FUNCTION]", required=False)
@click.option("--target", type=click.Choice(["metal", "cuda", "cpu", "all"]), default="all", show_default=True,
              help="The device to judge for; this machine need not have it.")  # fmt: skip
@click.option("--real-inputs", is_flag=True, help="Compute the index arrays (nothing else) and count what repeats.")
@click.option("--vocab", type=click.IntRange(min=1), metavar="N",
              help="Token ids of the trainer's step.  [default: those of --tokenizer, or 256]")  # fmt: skip
@click.option("--config", "file", metavar="FILE.toml", help="Read the trainer's settings from a TOML file.")
@common
@config_options()
def audit(
    function: str | None,
    target: str,
    real_inputs: bool,
    vocab: int | None,
    file: str | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Name every operation that can give different bits, on any device, from any machine.

    Without MODULE:FUNCTION it looks at the trainer's own step, with the settings of `mlxdet train`. With it, it looks
    at your code: the function is called without arguments and returns (fn, args), the function to trace and its
    arguments. Nothing is evaluated. Exit code 1 if anything can race or cannot be judged.

    \b
    Examples:
      mlxdet audit --preset small --dtype bfloat16
      mlxdet audit my_training:audited --target cuda
    """
    from mlxdet import backends
    from mlxdet.auditing.rules import TARGETS

    targets = TARGETS if target == "all" else (target,)
    if function is None:
        config = build_config(file, options)
        backends.activate("cpu", config.loop.kernels)
        results = _own_step(config, vocab, targets)
        what = f"the training step ({config.loop.kernels} kernels)"
    else:
        from mlxdet.errors import UsageError

        if file is not None or vocab is not None or given(options):
            raise UsageError("settings of the trainer's step do not go together with MODULE:FUNCTION")
        backends.activate("cpu")
        from mlxdet.auditing.audit import audit_targets
        from mlxdet.auditing.load import load

        fn, args = load(function)
        results = audit_targets(fn, args, {}, targets, "real" if real_inputs else "shapes")
        what = function
    if as_json:
        print_json({"audited": what, "ok": all(r.ok for r in results.values()),
                    "targets": {t: r.as_dict() for t, r in results.items()}})  # fmt: skip
    else:
        from mlxdet.report.audit import show

        show(what, results)
    return 0 if all(r.ok for r in results.values()) else 1


def _own_step(config: Any, vocab: int | None, targets: tuple[str, ...]) -> dict[str, Any]:
    from mlxdet.training.audit import audit_step

    if vocab is None and config.data.tokenizer:
        from mlxdet.data.tokenizer import load_tokenizer

        vocab = load_tokenizer(config.data.tokenizer).vocab_size
    from mlxdet.training.base import shaped

    resolved = shaped(config).resolve()
    return {t: audit_step(resolved, vocab or 256, t) for t in targets}
