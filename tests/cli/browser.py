"""A page in a real browser: what it measures of itself there, and how it looks."""

import html
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from PIL import Image

_FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--virtual-time-budget=2000",
]  # fmt: skip
# Appended to the page, which stands in a frame of the width to test: a window itself is at least 500 wide.
_MEASURE = """<script>addEventListener("load", () => {
  const box = e => { const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; };
  const texts = svg => [...svg.querySelectorAll("text")].map(t => [t.textContent, ...box(t)]);
  const out = {width: innerWidth, page: document.documentElement.scrollWidth,
    figures: [...document.querySelectorAll("figure")].map(f => ({title: f.querySelector("h3").textContent,
      box: box(f), marks: f.querySelectorAll(".segment, svg rect, svg polyline, svg circle").length,
      charts: [...f.querySelectorAll("svg")].map(s => ({box: box(s), texts: texts(s)})),
      labels: [...f.querySelectorAll(".bar-label span, .legend li, figcaption")].map(box)}))};
  parent.postMessage(JSON.stringify(out), "*");
});</script>"""
# Around the page: writes what it is told into the document, where --dump-dom shows it.
_FRAMES = """<!doctype html><body style="margin:0;display:flex"><script>addEventListener("message", e =>
  document.body.append(Object.assign(document.createElement("pre"), {className: "measured", hidden: true,
    textContent: e.data})));</script>"""


@dataclass(frozen=True)
class Seen:
    """What a browser made of a page."""

    measured: dict[str, Any]
    image: Image.Image


def see(
    page: Path, folder: Path, scheme: Literal["light", "dark"], widths: Sequence[int], height: int
) -> list[Seen]:
    """Open a page in Chromium, once for each width; skips the test where no Chromium is installed."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no chromium is installed: `apt-get install chromium`, or another Chromium on the PATH")
    copy, frames, shot = folder / "measured.html", folder / "frames.html", folder / "shot.png"
    copy.write_text(page.read_text() + _MEASURE)
    every = "".join(
        f'<iframe src="measured.html" style="border:0" width="{w}" height="{height}"></iframe>'
        for w in widths
    )
    frames.write_text(_FRAMES + every)
    profile = folder / "profile"
    shutil.rmtree(profile, ignore_errors=True)
    done = subprocess.run(
        [
            browser, *_FLAGS, f"--user-data-dir={profile}", f"--window-size={sum(widths)},{height}",
            f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}",
            f"--screenshot={shot}", "--dump-dom", frames.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    told = re.findall(r'<pre class="measured"[^>]*>(.*?)</pre>', done.stdout, flags=re.S)
    assert len(told) == len(widths), f"a page did not measure itself: {done.stderr[-2000:]}"
    by_width = {each["width"]: each for each in (json.loads(html.unescape(text)) for text in told)}
    image = Image.open(shot).convert("RGB")
    lefts = [sum(widths[:i]) for i in range(len(widths))]
    return [
        Seen(by_width[width], image.crop((left, 0, left + width, height)))
        for width, left in zip(widths, lefts, strict=True)
    ]


def faults(seen: Seen, scheme: Literal["light", "dark"]) -> list[str]:
    """What is wrong with how the page looks: figures empty, cut off, or with text on text."""
    wrong: list[str] = []
    width = seen.measured["width"]
    if seen.measured["page"] > width:
        wrong.append(f"the page is {seen.measured['page']} wide in a window of {width}")
    if (sum(seen.image.getpixel((2, 2))) > 3 * 128) != (scheme == "light"):
        wrong.append(f"the page's background is {seen.image.getpixel((2, 2))} in {scheme}")
    for figure in seen.measured["figures"]:
        name, (left, top, right, bottom) = figure["title"], figure["box"]
        if bottom > seen.image.height:
            wrong.append(f"{name}: below the screenshot, {bottom:.0f} of {seen.image.height}")
            continue
        if right > width or right - left < 0.3 * width or bottom - top < 80:
            wrong.append(f"{name}: its box is {figure['box']}")
        if not figure["marks"]:
            wrong.append(f"{name}: nothing is drawn")
        pixels = seen.image.crop((round(left), round(top), round(right), round(bottom)))
        counted = pixels.getcolors(1 << 13)  # None: more than that
        if counted and sum(count >= 30 for count, _ in counted) < 4:  # panel, ink, two of marks and grid
            wrong.append(f"{name}: almost blank, {len(counted)} colours")
        inside = [*figure["labels"], *(chart["box"] for chart in figure["charts"])]
        wrong += [f"{name}: {box} sticks out" for box in inside if box[0] < left or box[2] > right + 0.5]
        for chart in figure["charts"]:
            wrong += [f"{name}: {fault}" for fault in _text_faults(chart["texts"], chart["box"])]
    return wrong


def _text_faults(texts: list[list[Any]], chart: list[float]) -> list[str]:
    wrong: list[str] = []
    for i, (text, left, top, right, bottom) in enumerate(texts):
        if bottom - top < 9:
            wrong.append(f"{text!r} is {bottom - top:.1f} pixels high")
        if left < chart[0] - 1 or right > chart[2] + 1 or bottom > chart[3] + 1:
            wrong.append(f"{text!r} is cut off")
        for other, *box in texts[i + 1 :]:
            # glyphs fill less than their line's height
            if left < box[2] and box[0] < right and top + 2 < box[3] and box[1] + 2 < bottom:
                wrong.append(f"{text!r} on {other!r}")
    return wrong
