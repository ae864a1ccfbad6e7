"""Recipes: what is written is what runs; what is wrong is named with what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from headstart.heads import FAMILIES
from headstart.train.recipe import DataPart, Recipe
from headstart.train.recipe_file import load_recipe

MINIMAL = "target: toy\nout: out\ndata:\n  train: [rows.jsonl]\n"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "r.yaml").write_text(MINIMAL)
    return tmp_path / "r.yaml"


def test_defaults_and_overrides(recipe: Path) -> None:
    loaded = load_recipe(recipe, ["optim.lr=5e-4", "heads.draft_vocab_size=64", "resume=false", "every.log=3"])
    assert loaded.optim.lr == 5e-4 and loaded.heads.draft_vocab_size == 64
    assert loaded.resume is False and loaded.every.log == 3
    assert loaded.data.train == [str(recipe.parent / "rows.jsonl")]


def test_overrides_reach_into_what_is_null(recipe: Path) -> None:
    recipe.write_text(MINIMAL + "  cache_layers: null\nwandb: null\njoint:\n")
    loaded = load_recipe(recipe, ["data.cache_layers+=3", "wandb.project=p"])
    assert loaded.data.cache_layers == [3] and loaded.wandb is not None and loaded.wandb.project == "p"
    assert load_recipe(recipe, ["heads.family=eagle", "loss.regression=1"]).loss.regression == 1


def test_data_is_found_beside_the_recipe_or_in_the_working_folder(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cwd").mkdir()
    (tmp_path / "cwd" / "more.jsonl").write_text("{}\n")
    monkeypatch.chdir(tmp_path / "cwd")
    loaded = load_recipe(recipe, ["data.train+=more.jsonl"])
    assert loaded.data.train == [str(tmp_path / "rows.jsonl"), "more.jsonl"]
    with pytest.raises(ValueError, match=r"absent\.jsonl"):
        load_recipe(recipe, ["data.train+=absent.jsonl"])


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("learing_rate=1", r"learing_rate: unknown key; known here are .*'optim'"),
        ("optim.learing_rate=1", r"optim.learing_rate: unknown key; known here are .*'lr'"),
        ("optim.schedule=constnat", r"'cosine', 'linear' or 'constant'.*'constnat'"),
        ("optim.warmup=1.5", r"optim.warmup: .*less than or equal to 1.*1.5"),
        ("optim.lr=fast", r"optim.lr: .*number.*'fast'"),
        ("heads.num_draft_heads=0", r"greater than or equal to 1"),
        ("data.heldout=[rows.jsonl]", r"evaluation needs prompts of its own"),
        ("wandb={nam: x}", r"known here are \['mode', 'name', 'project'\]"),
        ("heads.family=medusa9", r"heads: .*unknown head family 'medusa9'; known are \['eagle'"),
        (
            "heads={family: medusa, unroll: 3, dropout: 0.1}",
            r"medusa heads have no dropout, unroll; they have features",
        ),
        ("loss.regression=1", r"medusa heads regress nothing: set loss.regression to 0"),
        ("out+=x", r"out is 'out', \+= goes on a list"),
        ("optim", r"is not key=value"),
        ("target.x=1", r"target is not a section"),
    ],
)
def test_what_is_wrong_is_named_with_what_is_allowed(recipe: Path, override: str, said: str) -> None:
    """FC-121."""
    with pytest.raises(ValueError, match=said):
        load_recipe(recipe, [override])


def test_a_missing_recipe_and_one_that_is_no_mapping(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no recipe at"):
        load_recipe(tmp_path / "absent.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ValueError, match="holds list"):
        load_recipe(tmp_path / "list.yaml")


def test_every_boolean_can_be_switched_off(recipe: Path) -> None:
    """FC-116, by command line and by file."""
    assert [n for n, field in Recipe.model_fields.items() if field.annotation is bool] == ["resume", "tensorboard"]
    assert [n for n, field in DataPart.model_fields.items() if field.annotation is bool] == ["packing", "remember"]
    names = ["resume", "tensorboard", "data.remember", "data.packing"]
    for value in (True, False):
        by_line = load_recipe(recipe, [f"{name}={value}" for name in names])
        text = f"{MINIMAL}  remember: {value}\n  packing: {value}\nresume: {value}\ntensorboard: {value}\n"
        (recipe.parent / "file.yaml").write_text(text)
        for loaded in (by_line, load_recipe(recipe.parent / "file.yaml")):
            found = (loaded.resume, loaded.tensorboard, loaded.data.remember, loaded.data.packing)
            assert found == (value,) * 4


def test_the_digest_sees_what_changes_the_result_and_nothing_else(recipe: Path) -> None:
    same = load_recipe(recipe).digest()
    assert load_recipe(recipe, ["every.log=1", "out=elsewhere", "evaluate.nodes=4"]).digest() == same
    assert load_recipe(recipe, [f"data.train=[{recipe.parent / 'rows.jsonl'}]"]).digest() == same
    assert load_recipe(recipe, ["tensorboard=true", "wandb={project: p}"]).digest() == same
    assert load_recipe(recipe, ["seed=1"]).digest() != same
    assert load_recipe(recipe, ["data.packing=true"]).digest() != same
    assert load_recipe(recipe, ["optim.lr=1"]).digest() != same


RECIPES = Path(__file__).parent.parent / "recipes"


@pytest.mark.parametrize("name", sorted(p.stem for p in RECIPES.glob("*.yaml") if not p.stem.startswith("accelerate-")))
def test_the_recipes_that_ship_are_valid(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options that the family knows, and data that is there; recipes for real targets begin with a distillation."""
    slug = name.removeprefix("eagle3-")
    (tmp_path / "out" / slug / "answers").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    loaded = load_recipe(RECIPES / f"{name}.yaml")
    kind = FAMILIES[loaded.heads.family]
    given = set(loaded.heads.model_dump(exclude={"family", "draft_vocab_size"}, exclude_none=True))
    assert given <= {"num_draft_heads", *kind.options}
