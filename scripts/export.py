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
    from headstart.infer.embedded import EMBEDDED, HUB_ID, load_target
    from headstart.scripts.doctor import load

    loaded = load(heads)
    check_format(to, loaded.config.family)
    if adapter is not None and target is None:
        raise typer.BadParameter("an adapter is merged into its target: give --target too", param_hint="--adapter")
    check_adapter(loaded.config.adapter, adapter)
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty: an engine might read what lies there; give another --out")
    model, tokenizer = (None, None) if target is None else load_target(target)
    name = loaded.config.target_name if target is None or Path(target).exists() else target
    folder, base = out, HUB_ID if name == EMBEDDED else name  # engines find nothing under the embedded one's name
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
    from headstart.heads.formats_table import read_config
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
    read_config(place)  # before the target, which may take longer
    model, _ = load_target(target)
    name = Path(target).name if Path(target).exists() else target
    heads, notes = import_heads(place, model, layer, name)
    heads.save_pretrained(out)
    for note in notes:
        typer.echo(f"note: {note}", err=True)
    config = heads.config
    said = "the target's vocabulary" if config.draft_vocab_size is None else f"{config.draft_vocab_size} tokens"
    typer.echo(f"{out}: {config.family} heads, {config.num_draft_heads} deep, reading {config.features}, saying {said}")


def check_adapter(wanted: str | None, adapter: Path | None) -> None:
    """Raises ValueError where heads go with an adapter (of digest ``wanted``) and none is given, or the other way."""
    if wanted is not None and adapter is None:
        raise ValueError(
            "these heads were trained together with an adapter on the target, and no engine loads the two as one: "
            "give --target and --adapter: the target is then exported with the adapter merged into it"
        )
    if wanted is None and adapter is not None:
        raise ValueError("these heads were trained on the bare target: leave --adapter out")
    if adapter is not None and not (adapter / "adapter_config.json").is_file():
        raise ValueError(f"{adapter} holds no adapter_config.json: expected the folder adapter beside the heads")


def merged(target: Any, adapter: Path, wanted: str | None) -> "PreTrainedModel":
    """``target`` with the adapter folder merged into its weights. Raises ValueError unless it is the one of digest
    ``wanted``."""
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ImportError("merging an adapter needs peft: pip install 'headstart-llm[train]'") from error

    from headstart.heads.adapter import digest, lora_tensors

    adapted = PeftModel.from_pretrained(target, str(adapter))
    found = [digest(tensors) for tensors in lora_tensors(adapted).values()]
    if wanted not in found:
        raise ValueError(f"the heads were trained with the adapter {wanted}, {adapter} holds {', '.join(found)}")
    whole: PreTrainedModel = adapted.merge_and_unload()
    return whole


def save_target(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", folder: Path) -> None:
    """The merged target as an ordinary model folder, its own generation settings as they are: transformers refuses to
    save some that it has loaded (a temperature without sampling)."""
    from transformers import GenerationConfig
    from transformers.utils import GENERATION_CONFIG_NAME

    settings, model.generation_config = model.generation_config, GenerationConfig()
    try:
        model.save_pretrained(folder)
    finally:
        model.generation_config = settings
    settings.to_json_file(folder / GENERATION_CONFIG_NAME)
    tokenizer.save_pretrained(folder)
