"""Is what was trained what is decoded, and are labels and masks where they belong? A target and its heads, examined.

Each check compares two ways to the same number, and says by how much they differ. See ``retrace`` for the two ways.

Legend: B rows, T tokens, S slots, K depths, F features, D draft vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from headstart.heads import DraftHeads, Tie
from headstart.heads.batch import predictions
from headstart.heads.tie import tokenizer_notes
from headstart.heads.vocab import check_draft_ids, count_tokens, coverage
from headstart.infer import checks
from headstart.infer.draft_heads import HeadsSource
from headstart.infer.parity import first_difference
from headstart.infer.probe import check_model
from headstart.infer.report import Report
from headstart.infer.speculator import Speculator
from headstart.infer.target import compute_dtype
from headstart.train.batches import collate
from headstart.train.features import online
from headstart.train.masking import Masked
from headstart.train.retrace import Messages, Taught, Text, acceptances, follow, greedy, laws_at, read, teach

CONVERSATION = ({"role": "user", "content": "Write three short sentences about the sea."},)
FEWEST, AFTER = 4, 4  # tokens of an answer that say anything; slots shown after the answer's first token
HALF, TF32, SINGLE, NOTHING = 0.1, 2e-2, 1e-3, 1e-6  # relative differences that are rounding, the last in equal shapes
POOR_COVER, UNTRAINED, LOST = 0.8, 0.02, 0.5  # below them a warning; the last is a share of what first guesses promise


class Check(NamedTuple):
    """One line: what was looked at, whether it holds, the figure, and what deserves a word although it holds."""

    name: str
    ok: bool
    figure: str
    warnings: tuple[str, ...] = ()


class Label(NamedTuple):
    """What a slot is taught at one depth, in token ids; None where the text has ended."""

    token: int | None
    counts: bool  # by the masks of the loss
    guess: int | None  # the first guess, where the label counts
    right: bool  # that guess is what the target says there


class Slot(NamedTuple):
    """One slot: its token and whether that one is supervised, the next token, and what the target says next."""

    slot: int
    token: int
    supervised: bool
    following: int
    best: int
    labels: tuple[Label, ...]  # [K]


class Examination(NamedTuple):
    """All checks, up to the first that makes the others pointless, and the slots around the answer's first tokens."""

    checks: tuple[Check, ...]
    slots: tuple[Slot, ...] = ()

    @property
    def ok(self) -> bool:
        """Nothing failed; warnings do not count."""
        return all(check.ok for check in self.checks)


@torch.no_grad()
def examine(
    target: Any, tokenizer: Any, heads: DraftHeads, conversation: Messages | None = None, *, tokens: int = 48
) -> Examination:
    """Runs every check on the last answer of ``conversation``, up to ``tokens`` of it; the target gives a missing one.

    ``heads`` stand on the device of the target's output; they keep the mode (train or eval) they are in. Raises
    ValueError for a conversation that template, mask or the target's length does not take.
    """
    if tokens < FEWEST:
        raise ValueError(f"{tokens} tokens of an answer were asked for; expected {FEWEST} or more")
    was_training = heads.training
    heads.train(False)
    try:
        found = [check_heads(target, heads, tokenizer)]
        if found[-1].ok:
            found.append(check_frozen(target, heads))
        if not found[-1].ok:
            return Examination(tuple(found))
        text = read(target, tokenizer, CONVERSATION if conversation is None else conversation, tokens)
        taught = teach(target, heads, text)
        shown, laws = follow(target, heads, text, len(taught.laws))
        exact, report = check_exactness(target, heads, text, tokens)
        found += [
            check_labels(target, heads, text, taught),
            check_features(target, heads, text, taught, shown),
            check_parity(target, heads, taught, laws),
            exact,
            check_leakage(target, heads, taught),
            check_vocabulary(heads, text),
            check_guesses(taught, report),
        ]
        return Examination(tuple(found), tuple(align(text, taught)))
    finally:
        heads.train(was_training)


def check_heads(target: Any, heads: DraftHeads, tokenizer: Any) -> Check:
    """Format, tensors, draft vocabulary and sizes; other weights of the same sizes and other tokens are warnings."""
    tensors = heads.state_dict()
    broken = [name for name, x in tensors.items() if x.is_floating_point() and not torch.isfinite(x).all()]
    if broken:
        return Check("heads", False, f"NaN or infinity in {', '.join(broken)}: train them anew")
    try:
        heads.config.check_format()
        if heads.draft_ids is not None:
            check_draft_ids(heads.draft_ids, heads.config.target_vocab_size)
        warnings = HeadsSource(heads).check(target) + tokenizer_notes(heads.config.target_tokenizer, tokenizer)
    except ValueError as error:
        return Check("heads", False, str(error))
    facts = f"{heads.config.family}, format {heads.config.format_version}, {len(tensors)} tensors finite, sizes fit"
    known = bool(heads.config.target_fingerprint) and not warnings
    return Check("heads", True, facts + (", the target's weights are those of training" if known else ""), (*warnings,))


def check_frozen(target: Any, heads: DraftHeads) -> Check:
    """What the toolkit relies on in a target, by its own self-test."""
    wants = HeadsSource(heads).wants
    try:
        notes = checks.check_target(target)
        check_model(target, wants)
    except ValueError as error:
        return Check("target", False, str(error))
    figure = f"hidden states {list(wants)} by number are those of the whole list, a tree says what plain text says"
    return Check("target", True, f"{figure}, {compute_dtype(target)}".replace("torch.", ""), (*notes,))


def check_labels(target: Any, heads: DraftHeads, text: Text, taught: Taught) -> Check:
    """The mask begins with the token after the generation prompt, and the loss counts and scores the labels that slot
    arithmetic says: token t + 2 + d, supervised, taught by the target at t + 1 + d."""
    losses = heads(taught.batch, Tie.of(target), weights=[1.0] * len(taught.laws))
    count, alpha = taught.labels.sum(1), (acceptances(target, heads, taught) * taught.labels).sum(1)
    first = text.row.supervised[text.start] and not text.row.supervised[text.start - 1]
    wrong = [] if first else [f"the mask does not begin with token {text.start}, the answer's first"]
    if losses.count.tolist() != count.tolist():
        wrong.append(f"the loss counts {losses.count.tolist()}")
    if not bool(((losses.alpha - alpha).abs() <= _rounding(target, heads) * alpha).all()):
        wrong.append(f"the loss finds an acceptance of {_short(losses.alpha)}, the slots have {_short(alpha)}")
    warnings = () if text.begins else ("the template renders the answered turn otherwise than the prompt for it",)
    figure = f"{count.tolist()} by depth" if wrong else f"{count.tolist()} by depth, as the loss counts and scores them"
    return Check("labels", not wrong, "; ".join([*wrong, figure, f"the answer begins at {text.start}"]), warnings)


def check_features(target: Any, heads: DraftHeads, text: Text, taught: Taught, shown: Tensor) -> Check:
    """The row's features are the same in a padded batch, and the same [T - 1, F] when decoding."""
    half = len(text.row.ids) // 2
    short = Masked(text.row.ids[:half], text.row.supervised[:half])
    batch = online(target, collate([short, text.row], [0, 1]), heads.config.features or ()).batch
    alone = taught.batch.features[0].float()
    padded = _apart(torch.cat([batch.features[0, :half], batch.features[1]]), torch.cat([alone[:half], alone]))
    decoded, limit = _apart(shown, alone[: len(shown)]), _rounding(target, heads)
    figure = (
        f"relative difference in a padded batch {padded:.1e}, when decoding {decoded:.1e} (up to {limit:.0e} is ok)"
    )
    return Check("features", padded <= limit and decoded <= limit, figure)


def check_parity(target: Any, heads: DraftHeads, taught: Taught, laws: dict[int, Tensor]) -> Check:
    """The drafter's logits, by slot [<= K, D], are those that the heads were trained to give."""
    places = {slot: i for i, slot in enumerate(taught.slots.tolist()) if slot in laws}
    limit, said, ok = _rounding(target, heads), [], bool(places)
    for depth, trained in enumerate(taught.laws):
        at = [slot for slot in places if len(laws[slot]) > depth]
        if not at:
            continue
        decoded = torch.stack([laws[slot][depth] for slot in at])
        expected = trained[[places[slot] for slot in at]]
        worst, scale = float((decoded - expected).abs().max()), float(expected.abs().max())
        ok = ok and worst <= limit * scale
        said.append(f"{worst:.1e} of {scale:.3g}")
    figure = f"largest difference of a logit by depth {', '.join(said)}, at {len(places)} slots"
    return Check("parity", ok, f"{figure} (up to {limit:.0e} of the largest is ok)")


def check_exactness(target: Any, heads: DraftHeads, text: Text, tokens: int) -> tuple[Check, Report]:
    """The greedy text with these heads is the target's own, near ties aside."""
    fast = Speculator(target, heads)
    ours = greedy(fast.generate, text.prompt, tokens)
    try:
        found = first_difference(target, text.prompt, text.plain, ours)
    except ValueError as error:
        return Check("exactness", False, str(error)), fast.report
    if found is None:
        return Check("exactness", True, f"{fast.report.tokens} of {fast.report.tokens} tokens equal"), fast.report
    return Check("exactness", found.near_tie, str(found)), fast.report


def check_leakage(target: Any, heads: DraftHeads, taught: Taught) -> Check:
    """Other features from a place on change no logit of the slots before it, other tokens none that they lead up to."""
    batch, tie, depths = taught.batch, Tie.of(target), len(taught.laws)
    length, slots, vocab = batch.tokens.shape[1], taught.slots, tie.weight.shape[0]
    node = slots + 1 + torch.arange(depths, device=slots.device)[:, None]  # [K, S] the last token that may be read
    leaks, reads = [], []
    for cut in (length - 1, int(slots[len(slots) // 2])):
        later = torch.arange(length, device=slots.device) >= cut
        states = (torch.where(later[:, None], -x, x) for x in (batch.features, batch.last))
        tokens = torch.where(later, (batch.tokens + 1) % vocab, batch.tokens)
        others = (dict(zip(("features", "last"), states, strict=True)), {"tokens": tokens})
        for other, reach in zip(others, (slots.expand_as(node), node), strict=True):
            laws = laws_at(heads, batch._replace(**other), tie, slots, depths)
            moved = (laws - taught.laws).abs().amax(-1)  # [K, S]
            leaks.append(moved[reach < cut])
            reads.append(moved[(reach >= cut) & (node < length)])
    leak, read_on = (float(torch.cat([*parts, slots.new_zeros(1)]).max()) for parts in (leaks, reads))
    figure = f"what comes later moves a logit by {leak:.1e}, what may be read by {read_on:.1e}"
    return Check("leakage", leak <= NOTHING * float(taught.laws.abs().max()), figure)


def check_vocabulary(heads: DraftHeads, text: Text) -> Check:
    """How much of the answer the heads can say."""
    size, total = heads.config.draft_vocab_size, heads.config.target_vocab_size
    if heads.draft_ids is None:
        return Check("vocabulary", True, f"all {total} tokens can be guessed")
    counts = count_tokens([(text.row.ids, text.row.supervised)], total)
    share = coverage(counts, heads.draft_ids.cpu())
    poor = (
        "many tokens of this answer can never be guessed: a larger draft vocabulary, or one of such answers, is needed"
    )
    figure = f"{size} of {total} tokens, ascending; they cover {share:.0%} of the answer"
    return Check("vocabulary", True, figure, (poor,) if share < POOR_COVER else ())


def check_guesses(taught: Taught, report: Report) -> Check:
    """First guesses on the known answer beside what the decoder makes of them; nothing here fails, it only warns."""
    right, labels = taught.right & taught.labels, taught.labels
    shares = (right.sum(1) / labels.sum(1).clamp(min=1)).tolist()
    whole = labels.all(0)
    promised = float(right[:, whole].long().cumprod(0).sum(0).float().mean()) if bool(whole.any()) else 0.0
    gained = report.tokens_per_pass - 1
    warnings = []
    if shares[0] < UNTRAINED:
        warnings.append(f"{shares[0]:.0%} of the first guesses are right: these heads are not trained, or not on this")
    if gained < LOST * promised and report.passes > 1:
        warnings.append(
            f"first guesses alone promise {1 + promised:.2f} tokens per pass, the decoder reaches {1 + gained:.2f}: "
            "see parity, and whether the answer is the target's own"
        )
    figure = f"right by depth {' '.join(f'{share:.0%}' for share in shares)}; {1 + gained:.2f} tokens per pass"
    return Check("guesses", True, figure, tuple(warnings))


def align(text: Text, taught: Taught) -> list[Slot]:
    """The slots from the last one without a label on to some after the answer's first token."""
    ids, batch, depths = text.row.ids, taught.batch, len(taught.laws)
    counts = [predictions(batch.supervised, batch.document, depth)[0].tolist() for depth in range(depths)]
    places = {slot: i for i, slot in enumerate(taught.slots.tolist())}
    guesses, right = taught.guesses.tolist(), taught.right.tolist()

    def label(slot: int, depth: int) -> Label:
        at, place = slot + 2 + depth, places.get(slot)
        if at >= len(ids):
            return Label(None, False, None, False)
        if place is None or not counts[depth][at]:
            return Label(ids[at], counts[depth][at], None, False)
        return Label(ids[at], True, guesses[depth][place], right[depth][place])

    shown = range(max(0, text.start - 2 - depths), min(len(ids) - 1, text.start + AFTER))
    labels = {t: tuple(label(t, depth) for depth in range(depths)) for t in shown}
    return [Slot(t, ids[t], text.row.supervised[t], ids[t + 1], int(taught.best[t]), labels[t]) for t in shown]


def _rounding(target: Any, heads: DraftHeads) -> float:
    """Largest relative difference that computing in another order may make: half precision, TF32 or float32."""
    if {compute_dtype(target), heads.dtype} & {torch.bfloat16, torch.float16} or getattr(target, "is_quantized", False):
        return HALF
    return SINGLE if torch.get_float32_matmul_precision() == "highest" else TF32


def _apart(one: Tensor, other: Tensor) -> float:
    """Largest relative distance of rows [n, F]."""
    return float(((one.float() - other).norm(dim=-1) / other.norm(dim=-1).clamp(min=1e-9)).max())


def _short(values: Tensor) -> list[float]:
    return [round(value, 3) for value in values.tolist()]
