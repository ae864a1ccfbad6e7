"""Evaluation: guesses on held-out answers, teacher forced, against a count written label by label; and prompts decoded
together, against each alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headstart.heads import FAMILIES, Tie
from headstart.train.__main__ import put_aside
from headstart.train.batches import collate
from headstart.train.evaluate import evaluate, validate
from headstart.train.features import online
from headstart.train.masking import Masked
from tests.families import disturbed
from tests.toys import VOCAB, llama


def rows(count: int = 5) -> list[Masked]:
    g = torch.Generator().manual_seed(1)
    sizes = [int(torch.randint(6, 20, (1,), generator=g)) for _ in range(count)]
    return [Masked(torch.randint(3, VOCAB, (n,), generator=g).tolist(), [i >= 3 for i in range(n)]) for n in sizes]


@pytest.mark.parametrize("kind", list(FAMILIES))
@pytest.mark.parametrize("draft_ids", [None, torch.arange(2, VOCAB, 3)], ids=["whole", "draft-vocabulary"])
def test_validation_counts_every_label_once(kind: str, draft_ids: Any) -> None:
    target = llama()
    heads: Any = FAMILIES[kind].from_target(target, draft_ids=draft_ids, num_draft_heads=3)
    with torch.no_grad():
        for p in heads.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(2)))
    heads.train()
    found = validate(target, heads, rows(), batch_size=2)
    assert heads.training
    right, joint, count = [0] * 3, [0] * 3, [0] * 3
    tie = Tie.of(target)
    for i, row in enumerate(rows()):
        with torch.no_grad():
            best = target(torch.tensor([row.ids])).logits[0].argmax(-1)
            batch = online(target, collate(rows(), [i]), heads.config.features).batch
            unrolled = list(heads.eval().unroll(batch, tie, 3))
            for slot in range(len(row.ids)):
                together = True
                for d, (slots, hidden) in enumerate(unrolled):
                    label = slot + 2 + d
                    if label >= len(row.ids) or not row.supervised[label]:
                        together = False
                        continue
                    at = slots[0].tolist().index(slot)
                    logits = heads.logits(hidden[0, at], batch.tokens[0, label - 1], d, tie)
                    guess = int(logits.argmax()) if draft_ids is None else int(draft_ids[logits.argmax()])
                    hit = guess == int(best[label - 1])
                    together = together and hit
                    right[d], joint[d], count[d] = right[d] + hit, joint[d] + together, count[d] + 1
    assert found.predictions == count[0]
    assert found.accuracy == pytest.approx([r / c for r, c in zip(right, count, strict=True)])
    assert found.tokens_per_pass >= 1.0 and all(0 <= a <= 1.0001 for a in found.alpha)
    # slots whose first labels are not supervised count jointly from the first that is
    assert all(j <= round(share * c) for j, share, c in zip(joint, found.chain, count, strict=True))


def test_rows_put_aside_are_the_last_and_never_all() -> None:
    train, aside = put_aside(rows(), 2)
    assert (train, aside) == (rows()[:3], rows()[3:])
    assert put_aside(rows(), 0) == (rows(), [])
    with pytest.raises(ValueError, match="validate_rows=5"):
        put_aside(rows(), 5)


def test_prompts_decoded_together_show_what_each_shows_alone() -> None:
    """Prompts of unequal length, one of whose answers ends early."""
    target, g = llama(), torch.Generator().manual_seed(4)
    heads = disturbed(FAMILIES["medusa"].from_target(target, num_draft_heads=3), 0.01)
    prompts = [torch.randint(3, VOCAB, (n,), generator=g) for n in (3, 9, 4, 6, 7, 5)]
    target.generation_config.eos_token_id = None
    texts = [target.generate(p[None], max_new_tokens=18, do_sample=False)[0].tolist() for p in prompts]
    target.generation_config.eos_token_id = texts[1][9 + 5]
    together = evaluate(target, heads, prompts, max_new_tokens=18, nodes=12)
    for batch_size in (1, 4):
        assert together == evaluate(target, heads, prompts, max_new_tokens=18, nodes=12, batch_size=batch_size)
    for prompt, text, draft in zip(prompts, texts, together.drafts, strict=True):
        assert draft.prompt == prompt.tolist() and len(draft.guessed) == len(draft.tokens)
        assert draft.prompt + draft.tokens == text[: len(prompt) + len(draft.tokens)]
    assert len(together.drafts[1].tokens) <= 6 and max(len(draft.tokens) for draft in together.drafts) == 18
    guessed = sum(sum(draft.guessed) for draft in together.drafts)
    assert together.tokens == sum(len(draft.tokens) for draft in together.drafts)
    assert guessed > 0 and together.tokens_per_pass == pytest.approx(together.tokens / (together.tokens - guessed))
