"""`headstart export` and `headstart import`: heads for serving engines, and heads that others trained."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

HEADS, TARGET = "heads", "target"  # folders of an export that brings its target along
ENGINE_FILES = ("config.json", "*.safetensors", "*.bin", "medusa_lm_head.pt")


def export(
    heads: Annotated[str, typer.Argument(help="Folder or Hub id of the heads.", metavar="HEADS")],
    to: Annotated[str, typer.Option(help="vllm, sglang, medusa (FasterDecoding) or eagle (SafeAILab).")],
    out: Annotated[Path, typer.Option(help="Folder to write; must be empty or not there.")],
    target: Annotated[
        str | None,
        typer.Option(help="smollm2 (embedded), a Hub id or a folder: where the layout holds tensors of the target."),
    ] = None,
    adapter: Annotated[
        Path | None,
        typer.Option(help="Adapter folder that the heads were trained with (Medusa-2): merged into OUT/target."),
    ] = None,
) -> None:
    """Write HEADS as a serving engine loads them, every tensor checked by name, shape and type."""
    from headstart.heads.formats import check_format, export_heads
    from headstart.infer.embedded import load_target
    from headstart.scripts.doctor import load

    loaded = load(heads)
    check_format(to, loaded.config.family)
    if adapter is not None and target is None:
        raise typer.BadParameter("an adapter is merged into its target: give --target too", param_hint="--adapter")
    if adapter is not None and out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty: an engine might read what lies there; give another --out")
    model, tokenizer = (None, None) if target is None else load_target(target)
    folder, base = out, None if target is None or Path(target).exists() else target
    if adapter is not None:
        model, folder, base = merged(model, adapter, loaded.config.adapter), out / HEADS, TARGET
    files, notes = export_heads(loaded, to, folder, model, base)
    if adapter is not None:
        assert model is not None and tokenizer is not None
        save_target(model, tokenizer, out / TARGET)
        notes.append(f"the target with the adapter merged in is {out / TARGET}: serve that one, whatever it is named")
    for note in notes:
        typer.echo(f"note: {note}", err=True)
    typer.echo(f"{folder}: {', '.join(files)}")


def import_(
    folder: Annotated[str, typer.Argument(help="Folder or Hub id of another project's draft model.", metavar="FOLDER")],
    target: Annotated[str, typer.Option(help="smollm2 (embedded), a Hub id or a folder: the model it drafts for.")],
    out: Annotated[Path, typer.Option(help="Folder to write the heads to.")],
    layer: Annotated[
        list[int] | None,
        typer.Option(help="A hidden_states index that EAGLE-3 heads read; once each, where their config does not say."),
    ] = None,
) -> None:
    """Make Headstart heads of what others trained: EAGLE-3, EAGLE-1/2 and Medusa, as engines and their authors keep
    them."""
    from huggingface_hub import snapshot_download
    from transformers.utils import logging as transformers_logging

    from headstart.heads.formats import import_heads
    from headstart.infer.embedded import load_target

    transformers_logging.disable_progress_bar()
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty; give another --out")
    place = Path(folder)
    if not place.is_dir():
        try:
            place = Path(snapshot_download(folder, allow_patterns=list(ENGINE_FILES)))
        except Exception as error:  # every client error means the same here
            raise OSError(
                f"cannot read '{folder}': expected a folder with config.json and weights, or a Hub id that can be "
                f"reached. huggingface_hub says: {error}"
            ) from error
    model, _ = load_target(target)
    heads, notes = import_heads(place, model, layer)
    heads.save_pretrained(out)
    for note in notes:
        typer.echo(f"note: {note}", err=True)
    config = heads.config
    said = "the target's vocabulary" if config.draft_vocab_size is None else f"{config.draft_vocab_size} tokens"
    typer.echo(f"{out}: {config.family} heads, {config.num_draft_heads} deep, reading {config.features}, saying {said}")


def merged(target: Any, adapter: Path, wanted: str | None) -> "PreTrainedModel":
    """``target`` with the adapter folder merged into its weights. Raises ValueError unless it is the one of digest
    ``wanted``."""
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ImportError("merging an adapter needs peft: pip install 'headstart-llm[train]'") from error

    from headstart.heads.adapter import digest, lora_tensors

    if wanted is None:
        raise ValueError("these heads were trained on the bare target: leave --adapter out")
    if not (adapter / "adapter_config.json").is_file():
        raise ValueError(f"{adapter} holds no adapter_config.json: expected the folder adapter beside the heads")
    adapted = PeftModel.from_pretrained(target, str(adapter))
    found = [digest(tensors) for tensors in lora_tensors(adapted).values()]
    if wanted not in found:
        raise ValueError(f"the heads were trained with the adapter {wanted}, {adapter} holds {', '.join(found)}")
    whole: PreTrainedModel = adapted.merge_and_unload()
    return whole


def save_target(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", folder: Path) -> None:
    """The merged target as an ordinary model folder."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
