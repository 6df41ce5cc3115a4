"""GPU figures: the table that plans are made from, and GPUs of the user's own."""

from pathlib import Path

import pytest

from agentrl.plan.gpus import find_gpu, gpus_from_toml, load_gpus

# name -> dense bfloat16 TFLOP/s, GB/s
FIGURES = {
    "A100": (312, 2039), "H100": (989, 3350), "H200": (989, 4800), "B200": (2250, 7700), "B300": (2250, 7750),
    "GB200": (2500, 8000), "MI300X": (1307, 5300), "MI355X": (2500, 8000), "L40S": (362, 864),
    "RTX 4090": (165, 1010), "RTX 5090": (209, 1792),
}  # fmt: skip


def test_the_table_holds_the_known_gpus() -> None:
    table = load_gpus()
    assert list(table) == list(FIGURES)
    for name, (tflops, gbs) in FIGURES.items():
        assert table[name].flops_per_second == tflops * 1e12
        assert table[name].bytes_per_second == gbs * 1e9
        assert len(table[name].source) > 20


@pytest.mark.parametrize("name", ["h100", "H100 SXM", "H100-80GB"])
def test_spelling_does_not_matter(name: str) -> None:
    assert find_gpu(name).name == "H100"


def test_a_file_adds_gpus_and_wins(tmp_path: Path) -> None:
    path = tmp_path / "gpus.toml"
    path.write_text('[H100]\nbf16_tflops = 1\nbandwidth_gbs = 2\nmemory_mib = 3\n[new]\nbf16_tflops = 4.5\n'
                    "bandwidth_gbs = 5\nmemory_mib = 6\n")  # fmt: skip
    table = load_gpus(path)
    assert table["H100"].memory_bytes == 3 * 2**20
    assert table["new"].flops_per_second == 4.5e12
    assert table["new"].source == "user-defined"
    assert "H200" in table


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[a", "not TOML"),
        ("a = 1", "outside a table"),
        ("[a]\nbf16_tflops = 1\nbandwidth_gbs = 1\nmemory_gb = 1", "unknown keys"),
        ("[a]\nbf16_tflops = 1\nbandwidth_gbs = 1", "memory_mib"),
        (
            "[a]\nbf16_tflops = 0\nbandwidth_gbs = 1\nmemory_mib = 1",
            "bf16_tflops must be at least 0.001, got 0",
        ),
        ("[a]\nbf16_tflops = 1\nbandwidth_gbs = inf\nmemory_mib = 1", "bandwidth_gbs must be at most"),
        ("[a]\nbf16_tflops = 1\nbandwidth_gbs = 1\nmemory_mib = nan", "memory_mib must be a number from"),
        ("[a]\nbf16_tflops = true\nbandwidth_gbs = 1\nmemory_mib = 1", "needs a number"),
    ],
)
def test_wrong_files_are_named(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        gpus_from_toml(text)
    with pytest.raises(ValueError, match=r"^mine.toml"):
        gpus_from_toml(text, "mine.toml")


def test_an_unknown_name_gives_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'MI300X'"):
        find_gpu("MI300")
    with pytest.raises(ValueError, match=r"did you mean 'H[12]00'\? known are A100, "):
        find_gpu("H99")
