"""What a benchmark found: the content of its file, and tables of it for a terminal and for a Markdown page."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table as RichTable

if TYPE_CHECKING:
    from headstart.infer.bench import Contestant
    from headstart.infer.figures import Run, Saved

NEAR = 0.1  # of a prediction that holds
WIDTH = 200  # characters of a table where there is no terminal
RESULTS = (
    *(
        "decoding",
        "n",
        "speed\nup",
        "95 %\nfrom-to",
        "no\nloops",
        "tok/\npass",
        "no\nloops",
        "tok/s",
        "1st\nms",
        "loop",
    ),
    "texts",
)
GUESSES = (
    *(
        "guesses",
        "own\nM",
        "draft\nms",
        "verify\nms",
        "plain\nms",
        "tok/\npass",
        "accepted\nby depth",
        "where the\none before",
    ),
    *("speed\nup", "95 %\nfrom-to", "half\npredicted", "half\nmeasured", "outside\n%", "outside\nms/tok"),
    *("forwards", "tokens"),
    "prefill/draft/plan/\nverify/accept/commit/\nother %",
)
NOTES = """\
n runs, in turn with plain `generate`, each first equally often, after a short call of each that counts nowhere.
Speed-up: tokens/s of whole calls, prefill included, over those of plain `generate` on the same prompts; the median and
an interval for it (its range where n < 6). "No loops": without prompts on which a text ends in a loop.
Texts: compared with what plain `generate` wrote; greedily "near tie" is rounding, "bug" is not.
Own: weights of what guesses, in millions. Draft, verify: milliseconds a step; plain: a step of plain `generate`.
Accepted by depth: share of the passes with a guess that deep on offer which kept it; "where the one before": of those
in which the guess before it was kept.
Half: the decoding loop alone on one half of the prompts of each task, prefill and preparations left out on both sides;
predicted from the other half: tokens of a step / (verify + draft + outside), over plain tokens a second there.
Outside: of both models' forwards, choosing trees, accepting, committing, as a share of the loop and for each token it
writes; of plain `generate`, and of others, what passes between two forwards of the target.
Forwards: of the target, prefill included. On an accelerator a part is what passed on the device, not on the host."""


class Table(NamedTuple):
    """Text cells; ``ends`` are the rows after which a section ends."""

    title: str
    columns: Sequence[str]  # a line end in a heading is where it may be broken
    rows: list[list[str]]
    ends: frozenset[int]


def content(
    runs: "Sequence[Run]", contestants: "Sequence[Contestant]", protocol: dict[str, Any], complete: bool
) -> "Saved":
    """All there is to save, as plain numbers, strings, lists and dicts."""
    from headstart.infer.bench import own_parameters
    from headstart.infer.figures import ALL, FIRST, VERSION, decodings, summary

    def figures(loops: bool) -> dict[str, Any]:
        found = {name: summary([r for r in runs if r.decoding == name], loops=loops) for name in decodings(runs)}
        return {n: {c: {s: one._asdict() for s, one in p.items()} for c, p in t.items()} for n, t in found.items()}

    def entry(one: "Contestant") -> dict[str, Any]:
        own = None if one.fast is None else own_parameters(one.fast.source)
        return {"name": one.name, "ours": one.fast is not None, "parameters": own, "refused": one.refused or None}

    first = {
        name: {
            length: {"runs": one.runs, "seconds": one.first_token, "speedup": one.first_token_speedup}
            for length, one in scopes.items()
            if length != ALL
        }
        for name, scopes in summary([run for run in runs if run.decoding == FIRST]).items()
    }
    found = {
        "version": VERSION,
        "complete": complete,
        "protocol": protocol,
        "contestants": [entry(one) for one in contestants],
        "figures": figures(True),
        "figures_without_loops": figures(False),
        "first_token": first,
        "runs": [run._asdict() for run in runs],
    }
    return cast("Saved", found)


def tables(found: Mapping[str, Any]) -> list[Table]:
    """Of the content of a file: for each decoding the results by task and what the guesses cost; the first token."""
    made = []
    for decoding in found["figures"]:
        made += [_results(found, decoding), _guesses(found, decoding)]
    if found["first_token"]:
        lengths = list(dict.fromkeys(length for one in found["first_token"].values() for length in one))
        columns = ["first token, ms (plain over it)", *(f"{length} tokens" for length in lengths)]
        rows = [
            [
                name,
                *(f"{1000 * of[at]['seconds']:.0f} ({of[at]['speedup']:.2f}x)" if at in of else "-" for at in lengths),
            ]
            for name, of in found["first_token"].items()
        ]
        made.append(Table("time to the first token, by prompt length", columns, rows, frozenset()))
    return made


def remarks(found: Mapping[str, Any]) -> list[str]:
    """What the tables do not say: who is slower, who refused, which texts differ and where."""
    from headstart.infer.figures import ALL

    said = []
    for decoding, of in found["figures"].items():
        slower = [f"{name} {one[ALL]['speedup']:.2f}x" for name, one in of.items() if one[ALL]["speedup"] < 1]
        if slower:
            said.append(f"{decoding}: slower than plain generate: {', '.join(slower)}")
        halves = {name: (one[ALL]["predicted"], one[ALL]["measured"]) for name, one in of.items()}
        off = {name: told / was - 1 for name, (told, was) in halves.items() if told and was}
        wide = [f"{name} {error:+.0%}" for name, error in off.items() if abs(error) > NEAR]
        if wide:
            said.append(f"{decoding}: predicted off by more than {NEAR:.0%}: {', '.join(wide)}")
    said += [f"{one['name']} refused: {one['refused']}" for one in found["contestants"] if one["refused"]]
    return said + [
        f"{run['contestant']}, {run['decoding']}, {line}" for run in found["runs"] for line in run["remarks"]
    ]


def show(found: Mapping[str, Any]) -> None:
    """Prints the tables and who is slower or refused; where texts differ is for the file."""
    console = Console(width=None if Console().is_terminal else WIDTH)
    for table in tables(found):
        shown = RichTable(title=table.title, box=SIMPLE, padding=(0, 1, 0, 0))
        for at, heading in enumerate(table.columns):
            text = at == 0 or heading in ("texts", *GUESSES[6:8])
            shown.add_column(heading, justify="left" if text else "right", no_wrap=not text, overflow="fold")
        for at, row in enumerate(table.rows):
            shown.add_row(*row, end_section=at in table.ends)
        console.print(shown)
    for line in remarks({**found, "runs": []}):
        typer.echo(line)


def markdown(found: Mapping[str, Any]) -> str:
    """The same as a page, with the conditions before it and what each column means behind it."""
    lines = ["# Benchmark" if found["complete"] else "# Benchmark, interrupted", ""]
    lines += [f"- {key}: {value}" for key, value in found["protocol"].items() if value is not None]
    for table in tables(found):
        lines += ["", f"## {table.title}", ""]
        lines.append(_line([" ".join(heading.replace("/\n", "/").split()) for heading in table.columns]))
        lines.append(_line(["---", *("---:" for _ in table.columns[1:])]))
        lines += [_line(row) for row in table.rows]
    return "\n".join([*lines, "", NOTES, "", *(f"- {line}" for line in remarks(found))]).rstrip() + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("  ", "&emsp;") for cell in cells) + " |"


def _results(found: Mapping[str, Any], decoding: str) -> Table:
    """A row for each contestant, and one for each task below it where there are several."""
    from headstart.infer.figures import ALL

    rows, ends = [], []
    for name, scopes in found["figures"][decoding].items():
        for scope, one in scopes.items() if len(scopes) > 2 else [(ALL, scopes[ALL])]:
            without = found["figures_without_loops"][decoding].get(name, {}).get(scope)
            cells = [
                name if scope == ALL else f"  {scope}",
                str(one["runs"]),
                f"{one['speedup']:.2f}x",
                f"{one['low']:.2f}-{one['high']:.2f}",
                f"{without['speedup']:.2f}x" if without else "-",
                f"{one['tokens_per_pass']:.2f}",
                f"{without['tokens_per_pass']:.2f}" if without else "-",
                f"{one['speed']:.1f}",
                f"{1000 * one['first_token']:.0f}",
                f"{one['looping']:.0%}",
                ", ".join(f"{count} {kind}" for kind, count in one["verdicts"].items()),
            ]
            rows.append(cells)
        ends.append(len(rows) - 1)
    return Table(f"{decoding}: beside plain generate", RESULTS, rows, frozenset(ends))


def _guesses(found: Mapping[str, Any], decoding: str) -> Table:
    """A row for each contestant: what its guesses cost and bring, over all tasks."""
    from headstart.infer.figures import ALL

    own = {one["name"]: one["parameters"] for one in found["contestants"]}
    rows = []
    for name, scopes in found["figures"][decoding].items():
        one = scopes[ALL]
        same = one["tokens"] == one["plain_tokens"]
        cells = [
            name,
            _number(own[name], 1e-6, 2),
            *(_number(one[key], 1000, 1) for key in ("draft", "verify", "plain_step")),
            f"{one['tokens_per_pass']:.2f}",
            *(" ".join(f"{s:.2f}" for s in one[key]) or "-" for key in ("accepted_by_depth", "accepted_given_parent")),
            f"{one['speedup']:.2f}x",
            f"{one['low']:.2f}-{one['high']:.2f}",
            *(_number(one[key], 1, 2, "x") for key in ("predicted", "measured")),
            _number(one["outside"], 100, 1),
            _number(one["outside_token"], 1000, 2),
            str(one["forwards"]),
            str(one["tokens"]) if same else f"{one['tokens']} (plain {one['plain_tokens']})",
            "/".join(f"{100 * share:.0f}" for share in one["split"].values()) or "-",
        ]
        rows.append(cells)
    return Table(f"{decoding}: what guesses cost and bring", GUESSES, rows, frozenset())


def _number(value: float | None, scale: float, digits: int, unit: str = "") -> str:
    return "-" if value is None else f"{value * scale:.{digits}f}{unit}"
