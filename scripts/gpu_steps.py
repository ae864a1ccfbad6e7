"""What `scripts/gpu-check` measures: a random target, how long passes take, and steps with an oracle."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from headstart.infer.figures import Run
    from headstart.infer.speculator import Speculator

LEARNT = 3  # texts the oracle may learn where a near tie turned the one before


class Mode(NamedTuple):
    """How verifying passes run."""

    name: str
    compile: bool | str = False  # of Speculator
    graphs: bool = False  # inductor records CUDA graphs
    contexts: int = 99  # only the first so many: each takes a compilation


class Setup(NamedTuple):
    """Sizes of everything."""

    target: dict[str, Any]  # of a LlamaConfig
    contexts: tuple[int, ...]  # tokens cached
    most: int  # nodes of the widest pass that is timed
    depth: int  # of the oracle's trees, and the children on a level
    branch: int
    acceptance: tuple[float, ...]
    new_tokens: int
    repeats: int  # of every timing
    modes: tuple[Mode, ...]

    @property
    def nodes(self) -> int:
        """Of the oracle's trees, root included."""
        return 1 + self.depth * self.branch


LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}
TOY = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
INDUCTOR = (Mode("compiled", True, contexts=1), Mode("CUDA graphs", True, graphs=True, contexts=1))
FULL = Setup(LLAMA_8B, (512, 4096, 32768), 128, 5, 3, (0.6, 0.8), 64, 3, (Mode("eager"), *INDUCTOR))
TINY = Setup(TOY, (24, 48), 12, 3, 2, (0.6, 0.8), 16, 1, (Mode("eager"), Mode("compiled", "eager", contexts=1)))


def random_target(sizes: dict[str, Any], device: str) -> Any:
    """A random Llama in bfloat16, born on ``device``, whose greedy text hangs on its context and has few near ties.

    Attention is sharp and every layer adds its share. One successor of each token stands out by about as much as the
    likeliest of all others do: where all outputs are alike, as after an ordinary start, near ties are so frequent that
    no text can be foretold.
    """
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(**sizes, pad_token_id=0, bos_token_id=None, eos_token_id=None)
    with torch.device(device), torch.no_grad():
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)
        generator = torch.Generator(device).manual_seed(0)
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                gain = 2.0 if "q_proj" in name or "k_proj" in name else 1.0
                gain = (2 * config.num_hidden_layers) ** -0.5 if "o_proj" in name or "down_proj" in name else gain
                std = 1.0 if "embed" in name else gain * weight.shape[1] ** -0.5
                weight.normal_(0.0, std, generator=generator)
        after = torch.randperm(config.vocab_size, generator=generator)
        stands_out = (2 * torch.tensor(float(config.vocab_size)).log()).sqrt() + 0.75  # standard deviations of a logit
        # of a last state, about half of the variance is its token's embedding
        alpha = float(stands_out) * 2**0.5 / config.hidden_size
        model.lm_head.weight.index_add_(0, after, model.get_input_embeddings().weight, alpha=alpha)
    return model


def machine(model: Any) -> dict[str, str]:
    """What the figures hold for."""
    from headstart.infer.costs import key_of
    from headstart.infer.draft_oracle import Oracle
    from headstart.infer.speculator import Speculator

    key = key_of(Speculator(model, Oracle([], 0.5)))
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    wanted = ("machine", "libraries", "model", "dtype", "attention")
    return {name: key[name] for name in wanted} | {"weights": f"{size / 1e9:.2f} GB"}


def verify_curve(model: Any, setup: Setup, context: int) -> dict[str, Any]:
    """Seconds of a pass over 1, 2 ... nodes, and of drafting, ``context`` tokens cached."""
    from headstart.infer.draft_oracle import Oracle
    from headstart.infer.measuring import measure
    from headstart.infer.speculator import Speculator

    fast = Speculator(model, Oracle([], 0.5, setup.depth, setup.branch), nodes=setup.most)
    costs = measure(fast, contexts=(context,), repeats=2 * setup.repeats)
    seconds = list(costs.curves[0].seconds)
    return {"context": context, "nodes": list(costs.sizes), "seconds": seconds, "draft": costs.drafts[0].seconds[-1]}


def decode_rows(model: Any, setup: Setup, mode: Mode, context: int) -> list[dict[str, Any]]:
    """Plain decoding and the oracle at each acceptance, in turn; a row of figures for each of the latter."""
    import torch
    from torch._dynamo.utils import counters

    from headstart.infer.bench import Contestant, Job, Prompt, measure, stock
    from headstart.infer.figures import figures, pooled

    torch.compiler.reset()
    counters.clear()
    generator = torch.Generator().manual_seed(context)
    prompt = torch.randint(model.config.vocab_size, (context,), generator=generator)
    ids = prompt[None].to(model.device)
    options = {"max_new_tokens": setup.new_tokens, "do_sample": False, "pad_token_id": 0}
    call = {"attention_mask": torch.ones_like(ids), **options}
    with recording(mode.graphs):
        plain, began = model.generate(ids, **call)[0].tolist(), perf_counter()
        fasts = {str(a): foretold(model, setup, mode, a, ids, plain, call) for a in setup.acceptance}
        ready = perf_counter() - began
        contestants = [*stock(model, lookup=False), *(Contestant.ours(name, fast) for name, fast in fasts.items())]
        work = [Job("greedy", i, [Prompt("random", str(context), prompt)], options) for i in range(setup.repeats)]
        runs = [run for job in measure(model, contestants, work, seed=0) for run in job]
        steps = {name: parts(fast, ids, call) for name, fast in fasts.items()}
    graphs, why = int(counters["stats"]["unique_graphs"]), skips(mode.graphs)
    rows = []
    for name, step in steps.items():
        beside = figures(runs, name)
        assert beside is not None
        depths = pooled([run.depths for run in runs if run.contestant == name])
        kept = sum(depth.kept for depth in depths) / max(sum(depth.reached for depth in depths), 1)
        row = {"mode": mode.name, "context": context, "nodes": setup.nodes, "asked": float(name), "kept": kept}
        row |= {"ready": ready, "graphs": graphs, "why_not_recorded": why}
        rows.append(row | beside._asdict() | {"step": step, "remarks": remarks(runs, name)})
    return rows


def foretold(
    model: Any, setup: Setup, mode: Mode, acceptance: float, ids: "Tensor", text: list[int], call: dict[str, Any]
) -> "Speculator":
    """A Speculator whose oracle knows what it writes after ``ids`` [1, P]: ``text``, or what a near tie made of it."""
    from headstart.infer.draft_oracle import Oracle
    from headstart.infer.speculator import Speculator

    for _ in range(LEARNT):
        oracle = Oracle([text], acceptance, setup.depth, setup.branch)
        fast = Speculator(model, oracle, nodes=setup.nodes, compile=mode.compile)
        before, text = text, fast.generate(ids, **call)[0].tolist()
        if text == before:
            break
    return fast


def parts(fast: "Speculator", ids: "Tensor", call: dict[str, Any]) -> dict[str, float]:
    """Seconds of a step by part, in a call whose passes and commits wait for the device: otherwise a pass would take as
    long as asking for it does, and accepting all the rest."""
    from headstart.infer.speculator import Speculator

    class Patient(Speculator):
        def bound(self, wants: tuple[int, ...], length: int) -> Any:
            return Waiting(super().bound(wants, length), ids.device)

    patient = Patient(fast.target, fast.source, nodes=fast.nodes, compile=fast.compiled or False)
    began = perf_counter()
    patient.generate(ids, **call)
    total, report = perf_counter() - began, patient.report
    split = {name: value / report.steps for name, value in report.seconds.items() if name != "prefill"}
    split["verify"] = report.seconds["verify"] / max(report.verify_steps, 1)  # the first one ran with the prompt's end
    return split | {"other": (total - report.total_seconds) / report.steps}


class Waiting:
    """A Target whose ``verify`` and ``commit`` return when the device is done."""

    def __init__(self, target: Any, device: Any) -> None:
        self._target, self._device = target, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def verify(self, tree: Any) -> Any:
        """The logits are there."""
        return self._done(self._target.verify(tree))

    def commit(self, path: Any) -> None:
        """Keys and values are in place."""
        self._done(self._target.commit(path))

    def _done(self, result: Any) -> Any:
        if self._device.type != "cpu":
            import torch

            torch.accelerator.synchronize(self._device)
        return result


@contextmanager
def recording(graphs: bool) -> Iterator[None]:
    """What inductor compiles inside is recorded as CUDA graphs, as in its mode "reduce-overhead"."""
    if not graphs:
        yield
        return
    import torch._inductor.config

    with torch._inductor.config.patch("triton.cudagraphs", True):
        yield


def skips(graphs: bool) -> str | None:
    """Why no CUDA graph was recorded, as far as that is known; None where one was, or none was asked for."""
    from torch._dynamo.utils import counters

    count = int(counters["inductor"]["cudagraph_skips"])
    return f"inductor left out {count} (TORCH_LOGS=perf_hints says why)" if graphs and count else None


def remarks(runs: "list[Run]", name: str) -> list[str]:
    """Where the texts of a contestant part from the plain ones."""
    return sorted({remark for run in runs if run.contestant == name for remark in run.remarks})
