"""Folders are floors: a file imports from strictly lower floors and from its folder's earlier files."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "agentrl"
# folder -> (floor, the files in the order in which they may import each other)
FLOORS: dict[str, tuple[int, tuple[str, ...]]] = {
    "gym": (0, ("tasks", "plain", "system_calls", "confine", "job", "unshared", "watch", "jail", "server",
                "sandbox", "env", "tokenizer", "rewrites", "programs", "demonstrations", "instructions")),
    "curriculum": (0, ("pass_rate", "rules", "table", "evidence", "sampler", "presets")),
    "plan": (
        0,
        ("inputs", "gpus", "models", "architectures", "configs", "roofline", "engine", "calibrate",
         "workload", "rollout", "memory", "hours", "advice"),
    ),
    "report": (0, ("figures", "picture", "html", "run", "learning", "savings")),
    "data": (
        1,
        ("trajectory", "records", "storage", "chat", "formats", "text_formats", "token_formats", "importers",
         "lengths", "collate", "advantages", "weights", "bins", "prefix_tree", "packing", "sequence_cost",
         "atoms", "balance", "microbatch"),
    ),
    "ops": (
        2,
        ("peak_memory", "uncompiled", "visibility", "attention", "bfloat16_product", "tiles", "gradient_sums",
         "logit_map", "head_inputs", "head_gradients", "stash", "tiled_head", "frozen_head", "log_probs",
         "fused_loss", "losses"),
    ),
    "models": (
        3,
        ("policy", "tiny", "shape", "hf_cache", "hf_attention", "hf_probe", "hf", "hf_turns", "hf_tokenizer",
         "load", "scoring", "reference"),
    ),
    "rollout": (4, ("decode", "episode")),
    "train": (
        5,
        ("config", "budget", "distributed", "checkpoint", "metrics", "recording", "rows", "objective",
         "step", "evaluate", "loop", "curriculum", "muon", "base", "start", "directory", "run"),
    ),
    "diagnose": (
        6,
        ("comparison", "generated", "isolation", "checks", "ratios", "stages", "verification", "verify",
         "census", "waste", "analyze"),
    ),
    "cli": (7, ()),
}  # fmt: skip
TORCH_FREE = ("gym", "curriculum", "plan", "report")


def imports_of(path: Path) -> set[str]:
    """Dotted names of the agentrl modules that a file imports, function-local imports included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path} uses a relative import"
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return {name for name in found if name.split(".")[0] == "agentrl"}


def violations(folder: str, file: str, imported: set[str]) -> list[str]:
    floor, order = FLOORS[folder]
    wrong: list[str] = []
    for name in imported:
        parts = name.split(".")[1:]
        if not parts or parts[0] not in FLOORS:
            continue
        other_floor, _ = FLOORS[parts[0]]
        if parts[0] == folder:
            if folder == "cli" or len(parts) == 1:
                continue
            if parts[1] in order and (file not in order or order.index(parts[1]) >= order.index(file)):
                wrong.append(f"{folder}/{file} imports its later sibling {name}")
        elif other_floor >= floor:
            wrong.append(f"{folder}/{file} (floor {floor}) imports {name} (floor {other_floor})")
    return wrong


@pytest.mark.parametrize("folder", FLOORS)
def test_imports_go_down(folder: str) -> None:
    for path in sorted((SOURCE / folder).glob("*.py")):
        if path.stem == "__init__":
            assert path.read_text() == "", f"{path} must be empty"
            continue
        assert folder == "cli" or path.stem in FLOORS[folder][1], f"{path} has no place in its floor"
        assert violations(folder, path.stem, imports_of(path)) == []


def test_a_planted_upward_import_is_seen() -> None:
    assert violations("data", "packing", {"agentrl.train.step"})
    assert violations("data", "packing", {"agentrl.data.microbatch"})
    assert violations("gym", "env", {"agentrl.plan.gpus"})
    assert not violations("train", "step", {"agentrl.data.packing", "agentrl.train.config"})


@pytest.mark.parametrize("folder", TORCH_FREE)
def test_torch_free_packages(folder: str) -> None:
    modules = [f"agentrl.{folder}.{p.stem}" for p in (SOURCE / folder).glob("*.py") if p.stem != "__init__"]
    code = f"import sys, {', '.join([f'agentrl.{folder}', *modules])}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
