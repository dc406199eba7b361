"""The page in a real browser: it loads without a network, shows the store's values, and reacts to pointer and keyboard."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from helpers.browser import Visit, chromium
from helpers.stores import write_store

from lightning_module_monitor import load_store
from lightning_module_monitor.histogram import EDGES, NUM_COUNTS, Histogram
from lightning_module_monitor.record import UNDEFINED, ModuleInfo
from lightning_module_monitor.report.page import write_report
from lightning_module_monitor.report.payload import pack

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]  # one worker makes what they share

DOCS = Path(__file__).parents[2] / "docs"
LAYERS = ("net.fc1", "net.relu", "net.fc2", "net.head")
NUM_STEPS = 12
SIZES = np.geomspace(1e-3, 50, len(LAYERS) * NUM_STEPS).reshape(len(LAYERS), NUM_STEPS)


def everything() -> dict[str, list[float | None]]:
    """Values for every section; a layer is dead, and a layer becomes NaN and infinite."""
    series: dict[str, list[float | None]] = {}
    for layer, sizes in zip(LAYERS, SIZES, strict=True):
        series[f"activation/{layer}/rms"] = sizes.tolist()
        series[f"activation/{layer}/mean"] = (sizes - 1).tolist()
        series[f"gradient/{layer}.weight/norm"] = (2 * sizes).tolist()
        series[f"update/{layer}.weight/ratio"] = (sizes / 1000).tolist()
        series[f"validation/activation/{layer}/rms"] = [None, 1.0]
        for kind in ("effective", "propagating"):
            series[f"rcc_{kind}_update/{layer}/rms"] = [0.0, *sizes[1:].tolist()]
            series[f"rcc_alignment/{layer}/{kind}"] = [None, *[0.5] * (NUM_STEPS - 1)]
    for head in range(3):
        series[f"attention_entropy/net.attention.head_{head}/mean"] = [float(head + step) for step in range(NUM_STEPS)]
    series["activation/net.relu/rms"] = [*SIZES[1, :6].tolist(), *[0.0] * 6]
    series["activation/net.head/rms"] = [*SIZES[3, :9].tolist(), math.nan, math.inf, None]
    series["gradient_flow/net.fc1-net.fc2/gain"] = [1.5] * NUM_STEPS
    series["gradient_flow/net.fc2-net.head/gain"] = [0.7] * NUM_STEPS
    for rank, name in enumerate(("p01", "p05", "p25", "median", "p75", "p95", "p99")):
        series[f"gradient/net.fc1.weight/{name}"] = [(rank - 3.0) * (step + 1) for step in range(NUM_STEPS)]
    series["gradient/net.fc2.weight/median"] = [0.5, math.nan, 0.25]
    for rank in (1, 2, 3):
        sizes: list[float | None] = [(10.0 - 3 * rank) * (step + 1) for step in range(NUM_STEPS)]
        sizes[1:3] = [UNDEFINED, math.nan] if rank == 3 else sizes[1:3]
        series[f"parameter/net.fc2.weight/singular_value_{rank}"] = sizes
        series[f"parameter/net.fc1.weight/singular_value_{rank}"] = [5.0 if rank == 1 else UNDEFINED] * NUM_STEPS
        for layer in ("fc1", "fc2"):
            series[f"parameter/net.{layer}.weight/residual_{rank}"] = [0.25 * rank] * NUM_STEPS
    for loss in ("underflow", "overflow", "scaled_underflow"):
        series[f"gradient/net.fc1.weight/{loss}_float16"] = [0.5 if loss == "underflow" else 0.0]
    series["monitor/errors"] = [0.0] * NUM_STEPS
    series["context/loss"] = [2.0 / (step + 1) for step in range(NUM_STEPS)]
    series["context/val_loss"] = [None] * 6 + [1.5] * (NUM_STEPS - 6)
    series["context/lr"] = [0.1] * NUM_STEPS
    series["context/lr_1"] = [0.2] * NUM_STEPS
    for kind, norm in (("gradient_before_clip", 2.0), ("gradient", 1.0), ("parameter", 7.0)):
        series[f"{kind}/_root_/norm"] = [norm] * NUM_STEPS
    series["gradient/net.fc1/norm"] = [0.5] * NUM_STEPS  # with per_module
    return series


MODULES = [
    ModuleInfo("net", "Net", 7000, (32, 3), "float32"),
    ModuleInfo("net.fc1", "Linear", 6800, (32, 64), "bfloat16"),
    ModuleInfo("net.relu", "ReLU", 0),
    ModuleInfo("net.fc2", "Linear", 197),
    ModuleInfo("net.head", "Linear", 3),
]


def histogram(scale: float) -> Histogram:
    """Half of the elements at ``scale``, half at minus that, and an infinite one."""
    row = np.zeros(NUM_COUNTS, np.int64)
    row[1 + np.searchsorted(EDGES, scale, "right") - 1] = 2
    row[1 + np.searchsorted(EDGES, -scale, "left") - 1] = 2
    row[-2] = 1
    return Histogram(row)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser for all tests of this file."""
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run with values for every section."""
    folder = tmp_path_factory.mktemp("page")
    histograms = {"gradient/net.fc1.weight/hist": [histogram(0.3), histogram(3.0)]}
    store = write_store(folder / "m.h5", everything(), histograms=histograms, configuration={"every_n_steps": 10}, modules=MODULES)
    write_report([load_store(store)], folder / "m.html")
    return folder / "m.html"


@pytest.fixture(scope="module")
def opened(browser: Browser, page: Path) -> Visit:
    """That page, opened once: a browser takes seconds to read plotly."""
    return Visit(browser, page)


@pytest.fixture
def visit(opened: Visit) -> Visit:
    """That page, without a search and with the first choices."""
    opened.page.fill("#search", "")
    opened.page.select_option("#heat-table", '{"kind":"activation","statistic":"rms"}')
    opened.page.wait_for_timeout(200)
    return opened


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of two runs: values of the second are twice as large, and a layer has another name."""
    folder = tmp_path_factory.mktemp("comparison")
    first = everything()
    second = {key: [None if value is None else 2 * value for value in values] for key, values in first.items()}
    second["activation/net.new/rms"] = second.pop("activation/net.fc2/rms")
    runs = (("before", first, 10), ("after", second, 20))
    stores = [write_store(folder / f"{name}.h5", series, configuration={"every_n_steps": every}) for name, series, every in runs]
    write_report([load_store(store) for store in stores], folder / "both.html")
    return folder / "both.html"


SECTIONS = ("heat", "profiles", "updates", "rcc", "attention", "histograms", "quantiles", "spectra")


def assert_it_draws_alone(visit: Visit, path: Path) -> None:
    """Every section draws; the console is silent; the only request is for the file itself; no button uploads a chart."""
    for section in (name for name in SECTIONS if visit.page.locator(f"#{name}").count()):
        visit.show(section)
        assert visit.page.locator(f"#{section}-error").text_content() == ""
    visit.settle()
    assert visit.complaints == []
    assert visit.requests == [path.as_uri()]
    titles = visit.page.eval_on_selector_all(".modebar-btn", "all => all.map(item => item.dataset.title)")
    assert {"Zoom", "Reset axes"} <= set(titles)
    assert not [title for title in titles if "hare" in title or "loud" in title]


def test_it_loads_without_messages_and_without_a_network(visit: Visit, page: Path) -> None:
    """The page of a run in light colours."""
    assert_it_draws_alone(visit, page)


def hover(visit: Visit, row: int, column: int, rows: int, columns: int) -> str:
    """The text of the first heat map for the cell under the pointer."""
    box = visit.page.locator("#heat-charts .nsewdrag").first.bounding_box()
    assert box is not None
    x, y = box["x"] + box["width"] * (column + 0.5) / columns, box["y"] + box["height"] * (row + 0.5) / rows
    visit.page.mouse.move(x - 3, y)
    visit.page.mouse.move(x, y, steps=3)
    tip = visit.page.locator("#heat-charts .tip").first
    tip.wait_for()
    visit.page.wait_for_timeout(150)
    return tip.text_content() or ""


def test_the_heat_map_answers_the_pointer(visit: Visit) -> None:
    """Site, step and value of the store, to four digits; also NaN, infinity, zero and values that were not recorded."""
    visit.show("heat")
    visit.settle()
    expected = {
        (0, 3): f"net.fc1\nstep 30\nrms {SIZES[0, 3]:.4g}",
        (2, 11): f"net.fc2\nstep 110\nrms {SIZES[2, 11]:.4g}",
        (1, 8): "net.relu\nstep 80\nrms 0",
        (3, 9): "net.head\nstep 90\nrms NaN",
        (3, 10): "net.head\nstep 100\nrms inf",
        (3, 11): "net.head\nstep 110\nrms not recorded",
    }
    for (row, column), expected_text in expected.items():
        text = hover(visit, row, column, len(LAYERS), NUM_STEPS)
        assert text.splitlines()[:2] == expected_text.splitlines()[:2]
        value, expected_value = (lines.splitlines()[2].split()[-1] for lines in (text, expected_text))
        assert value == expected_value or float(value) == pytest.approx(float(expected_value), rel=1e-3)


def test_the_heat_map_answers_the_keyboard(visit: Visit) -> None:
    """Arrow keys move from cell to cell and show its text, also to screen readers; Enter shows the site's curve."""
    visit.show("heat")
    visit.settle()
    visit.page.locator("#heat-charts .chart").first.focus()
    for key in ("ArrowRight", "ArrowDown", "ArrowRight"):
        visit.page.keyboard.press(key)
    assert (visit.page.locator("#status").text_content() or "").startswith("net.relu\nstep 10\nrms 0.0")
    assert visit.page.locator("#heat-charts .tip").first.is_visible()
    visit.page.keyboard.press("Enter")
    visit.settle()
    assert visit.page.input_value("#heat-site") == "net.relu"
    assert visit.complaints == []


def test_the_loss_is_above_the_heat_map_over_the_same_steps(visit: Visit) -> None:
    """Both share the axis of steps, which the cells fill; the lines have the store's values; another figure can be selected."""
    visit.show("heat")
    visit.settle()
    above = "document.querySelector('#heat-charts .chart').data.filter(item => item.type === 'scatter' && item.yaxis === 'y2')"
    assert visit.page.evaluate(f"{above}.map(item => item.name)") == ["loss", "val_loss"]
    np.testing.assert_allclose(visit.page.evaluate(f"[...{above}[0].y]"), everything()["context/loss"], rtol=1e-3)
    assert visit.page.evaluate(f"[...{above}[0].x]") == [10 * step for step in range(NUM_STEPS)]
    axes = "document.querySelector('#heat-charts .chart')._fullLayout"
    assert visit.page.evaluate(f"{axes}.xaxis.range") == [-5, 10 * NUM_STEPS - 5]
    assert visit.page.evaluate(f"[{axes}.yaxis.domain[1] < {axes}.yaxis2.domain[0], {axes}.yaxis2.anchor]") == [True, "x"]
    visit.page.select_option("#heat-above", "lr")
    visit.settle()
    assert visit.page.evaluate(f"{above}.map(item => item.name)") == ["lr"]
    visit.page.select_option("#heat-above", "loss")


def test_modules_are_named_in_a_tree_and_where_the_pointer_is(visit: Visit) -> None:
    """Type, output and parameters in a table that the search filters; in a heat map and in profiles the type beside the number."""
    rows = visit.page.eval_on_selector_all("#modules tbody tr", "all => all.map(item => item.innerText.split('\\t'))")
    assert rows == [
        ["net", "Net", "[32, 3]", "float32", "7,000"],
        ["fc1", "Linear", "[32, 64]", "bfloat16", "6,800"],
        ["relu", "ReLU", "", "", "0"],
        ["fc2", "Linear", "", "", "197"],
        ["head", "Linear", "", "", "3"],
    ]
    visit.show("heat")
    visit.settle()
    assert hover(visit, 0, 3, len(LAYERS), NUM_STEPS).splitlines()[3] == "Linear, output [32, 64] bfloat16"
    assert hover(visit, 3, 3, len(LAYERS), NUM_STEPS).splitlines()[3] == "Linear"
    visit.show("profiles")
    visit.settle()
    text = "document.querySelectorAll('#profiles-charts .chart')[0].data.find(item => item.text).text[0]"
    assert visit.page.evaluate(text).endswith("<br>Linear, output [32, 64] bfloat16")


def glance_of(visit: Visit) -> dict[str, dict[str, float]]:
    """The first value of each line of the charts at the top, by title and name."""
    visit.page.evaluate("scrollTo(0, 0)")
    visit.page.locator("#glance-charts .main-svg").first.wait_for()
    first = "line => [line.name, line.y.find(value => value !== null)]"
    script = f"all => Object.fromEntries(all.map(item => [item.layout.title.text, Object.fromEntries(item.data.map({first}))]))"
    charts: dict[str, dict[str, float]] = visit.page.eval_on_selector_all("#glance-charts .chart", script)
    return charts


def test_the_first_screen_has_the_curves_that_are_looked_at_first(visit: Visit) -> None:
    """Losses, learning rates, norms of the whole model and of modules, on the screen with the verdict before anything is scrolled."""
    charts = glance_of(visit)
    assert charts == {
        "loss": {"loss": 2.0, "val_loss": 1.5},
        "learning rate": pytest.approx({"lr": 0.1, "lr_1": 0.2}, rel=1e-3),
        "norm of the whole gradient": {"before clipping": 2.0, "gradient": 1.0},
        "norm of all parameters": {"parameters": 7.0},
        "norm of the gradient by module": {"net.fc1": 0.5},
    }
    low, high = visit.page.evaluate("document.querySelectorAll('#glance-charts .chart')[3]._fullLayout.yaxis.range")
    assert 6 < low < 7 < high < 8  # also of a value that never changes
    verdict, glance = (visit.page.locator(f"#{name}").bounding_box() for name in ("verdict", "glance"))
    assert verdict is not None
    assert glance is not None
    assert verdict["y"] == glance["y"]
    assert glance["x"] >= verdict["x"] + verdict["width"]


def test_the_lines_of_many_blocks_have_a_legend(browser: Browser, tmp_path: Path) -> None:
    """With short names, looks that differ, and the plot as high as without; all names are on the chart."""
    series: dict[str, list[float | None]] = {f"gradient/model.blocks.{block}/norm": [1.0 + block, 2.0] for block in range(12)}
    modules = [ModuleInfo(f"model.blocks.{block}", "Block", 1) for block in range(12)]
    write_report(write_store(tmp_path / "m.h5", series, modules=modules), tmp_path / "m.html")
    visit = Visit(browser, tmp_path / "m.html")
    assert glance_of(visit) == {"norm of the gradient by module": {str(block): 1.0 + block for block in range(12)}}
    chart = "document.querySelector('#glance-charts .chart')"
    names = visit.page.eval_on_selector_all("#glance-charts .legendtext", "all => all.map(item => item.textContent)")
    assert names == [str(block) for block in range(12)]
    looks: list[str] = visit.page.evaluate(f"{chart}.data.map(item => `${{item.line.color}} ${{item.line.dash}}`)")
    assert len(set(looks)) == 12
    legend, plot = (visit.page.locator(f"#glance-charts .{name}").first.bounding_box() for name in ("legend", "nsewdrag"))
    assert legend is not None
    assert plot is not None
    assert legend["y"] + legend["height"] <= plot["y"] + 2
    assert plot["height"] > 100
    visit.page.close()


PRINTED = """() => {
  const charts = [...document.querySelectorAll('.chart')];
  return {
    counts: charts.map(item => item.querySelectorAll('.scatterlayer .trace, .heatmaplayer .hm').length),
    sections: [...new Set(charts.map(item => item.closest('section')?.id ?? 'glance'))],
    widths: charts.map(item => [item.clientWidth, Math.round(item.querySelector('.main-svg').getBoundingClientRect().width)]),
    ground: getComputedStyle(document.body).getPropertyValue('--panel').trim(),
    font: document.querySelector('#heat-charts .chart').layout.font.color,
  };
}"""


@pytest.mark.parametrize("dark", [False, True])
def test_printing_draws_every_figure(browser: Browser, page: Path, tmp_path: Path, dark: bool) -> None:
    """Also those that were never in view, at once, as wide as a page, in light colours; then the page is as it was before."""
    visit = Visit(browser, page, dark=dark)
    visit.page.evaluate(f"addEventListener('beforeprint', () => (window.printed = ({PRINTED})()))")  # after the page's own
    (tmp_path / "page.pdf").write_bytes(visit.page.pdf(format="A4"))
    printed = visit.page.evaluate("window.printed")
    assert set(printed["sections"]) == {"glance", *SECTIONS}
    assert len(printed["counts"]) == 21
    assert min(printed["counts"]) > 0
    assert all(0 < chart == drawn <= 700 for chart, drawn in printed["widths"])
    assert (printed["ground"], printed["font"]) == ("#ffffff", "#1c2430")
    visit.settle()
    assert visit.page.evaluate("document.documentElement.dataset.print") is None
    assert visit.page.evaluate("getComputedStyle(document.body).getPropertyValue('--panel').trim()") == ("#1b2129" if dark else "#ffffff")
    widths = "document.querySelector('#glance-charts .chart').clientWidth"
    assert visit.page.evaluate(f"document.querySelector('#glance-charts .main-svg').getAttribute('width') == {widths}")
    assert visit.complaints == []
    visit.page.close()


def test_tables_fit_on_paper(browser: Browser, tmp_path: Path) -> None:
    """Also with keys that are longer than a line: no column is cut at the edge of the page."""
    long = f"context/{'validation_accuracy_of_' * 5}all_languages"
    store = write_store(tmp_path / "m.h5", {**everything(), long: [1.23456e-7, 2.0, 3.0, 4.0]}, modules=MODULES)
    visit = Visit(browser, write_report(store))
    visit.page.emulate_media(media="print")
    visit.page.evaluate("document.documentElement.dataset.print = 'yes'")
    right, edge = visit.page.evaluate(
        "() => [Math.max(...[...document.querySelectorAll('table')].map(item => item.getBoundingClientRect().right)),"
        " document.querySelector('main').getBoundingClientRect().right]"
    )
    assert right <= edge
    visit.page.close()


def test_charts_fit_when_the_window_changes(visit: Visit) -> None:
    """A chart is as wide as its place, in a window that became narrower, and in one that became wider again."""
    visit.show("heat")
    for width in (700, 1200):
        visit.page.set_viewport_size({"width": width, "height": 800})
        visit.settle()
        drawn, place = visit.page.eval_on_selector("#heat-curve", "item => [item.querySelector('.main-svg').clientWidth, item.clientWidth]")
        assert drawn == place


def test_numbers_are_unpacked_as_they_were_packed(visit: Visit) -> None:
    """To four digits, with zeros, signs and what is not finite; a value that was not recorded is a NaN of its own."""
    values = np.array([0.0, 1.5, -2.25e-30, 3.1415, 1e30, np.inf, -np.inf, np.nan, 7.0])
    script = "text => [...unpack(text)].map(String).concat((new Uint32Array(unpack(text).buffer)[8] === ABSENT_BITS).toString())"
    *numbers, is_absent = visit.page.evaluate(script, pack(values, np.arange(9) < 8))
    np.testing.assert_allclose([float(number.replace("Infinity", "inf")) for number in numbers[:8]], values[:8], rtol=2.0**-16)
    assert is_absent == "true"


def test_names_stay_whole(browser: Browser, comparison: Path) -> None:
    """On a phone a name of the table of differences is on one line, and the table scrolls."""
    visit = Visit(browser, comparison, width=420)
    heights = visit.page.eval_on_selector_all("#match .link", "all => all.map(item => item.getClientRects().length)")
    assert heights
    assert set(heights) == {1}
    assert visit.page.evaluate("document.documentElement.scrollWidth") == 420
    visit.page.close()


def test_rows_of_attention_are_layers(browser: Browser, tmp_path: Path) -> None:
    """By their number, where their names differ by a number alone; else by their names."""
    for names, rows in (
        (["model.0.attn", "model.11.attn"], ["layer 0", "layer 11"]),
        (["encoder.attn", "decoder.attn"], ["encoder.attn", "decoder.attn"]),
    ):
        series: dict[str, list[float | None]] = {f"attention_entropy/{name}.head_0/mean": [1.0, 2.0] for name in names}
        write_report([load_store(write_store(tmp_path / "m.h5", series))], tmp_path / "m.html")
        (tmp_path / "m.h5").unlink()
        visit = Visit(browser, tmp_path / "m.html")
        visit.show("attention")
        visit.settle()
        chart = "document.querySelector('#attention-charts .chart')"
        assert visit.page.evaluate(f"{chart}.cells.names") == rows
        assert visit.page.evaluate(f"{chart}.describe(1, 0)").startswith(f"{names[1]}, head 0\n")
        assert visit.page.evaluate(f"[...{chart}.parentElement.children].at(-1).data.map(line => line.name)") == rows
        visit.page.close()


def test_the_noise_scale_is_drawn_with_the_batch_size(browser: Browser, tmp_path: Path) -> None:
    """A line for the whole model and for each module, and one for the batch size; a scale that is not known leaves a gap."""
    series: dict[str, list[float | None]] = {
        "gradient_noise/_root_/scale": [90.0, UNDEFINED, 120.0],
        "gradient_noise/_root_/noise": [1.0, 1.0, 1.0],
        "gradient_noise/model.blocks.0/scale": [40.0, 50.0, 60.0],
        "context/batch_size": [32.0, 32.0, 32.0],
    }
    modules = [ModuleInfo(name, "Linear", 1) for name in ("_root_", "model.blocks.0")]
    write_report([load_store(write_store(tmp_path / "m.h5", series, modules=modules))], tmp_path / "m.html")
    visit = Visit(browser, tmp_path / "m.html")
    visit.show("noise")
    traces = visit.page.evaluate("document.getElementById('noise-chart').data.map(({ name, y }) => [name, [...y]])")
    assert [name for name, _values in traces] == ["whole model", "model.blocks.0", "batch size of the run"]
    assert [value if value is None else round(value) for value in traces[0][1]] == [90, None, 120]
    assert traces[2][1] == [32, 32, 32]
    assert not visit.complaints
    visit.page.close()


def names_of_rows(visit: Visit) -> list[str]:
    """The rows of the first heat map."""
    names: list[str] = visit.page.evaluate("document.querySelector('#heat-charts .chart').cells.names")
    return names


def test_the_search_filters(visit: Visit) -> None:
    """By a part of the name, or a pattern; it shows their number; charts and verdict show the matching sites."""
    visit.show("heat")
    visit.settle()
    assert names_of_rows(visit) == list(LAYERS)
    for text, left in (("FC", ["net.fc1", "net.fc2"]), ("/relu$|head$/", ["net.relu", "net.head"]), ("/(/", []), ("", list(LAYERS))):
        visit.page.fill("#search", text)
        visit.page.wait_for_timeout(250)
        visit.settle()
        assert names_of_rows(visit) == left
    visit.page.fill("#search", "net.head")
    visit.page.wait_for_timeout(250)
    assert visit.page.locator("#search-count").text_content() == "3 of 13 sites"  # the module, its weight, the transition to it
    shown = visit.page.eval_on_selector_all(
        "#verdict [data-site]", "all => all.filter(item => !item.hidden).map(item => item.dataset.site)"
    )
    assert shown
    assert set(shown) <= {"net.head", "net.head.weight"}


def test_the_slider_moves_the_profiles(visit: Visit) -> None:
    """By the keyboard, step by step; the line is the step's values over the layers."""
    visit.show("profiles")
    visit.settle()
    assert visit.page.locator("#profiles-step-name").text_content() == "step 110"
    visit.page.locator("#profiles-step").focus()
    for _ in range(7):
        visit.page.keyboard.press("ArrowLeft")
    visit.settle()
    assert visit.page.locator("#profiles-step-name").text_content() == "step 40"
    assert visit.page.get_attribute("#profiles-step", "aria-valuetext") == "step 40"
    drawn: list[float] = visit.page.evaluate(
        "document.querySelector('#profiles-charts .chart').data.find(item => item.name === 'step 40').y"
    )
    np.testing.assert_allclose(drawn, SIZES[:, 4], rtol=1e-3)
    visit.page.keyboard.press("End")
    for _ in range(2):
        visit.page.keyboard.press("ArrowLeft")
    visit.settle()
    marks: list[list[Any]] = visit.page.evaluate(
        "document.querySelector('#profiles-charts .chart').data.filter(item => item.mode === 'markers')"
        ".map(item => [item.marker.symbol, [...item.x]])"
    )
    assert marks == [["x", [3]], ["triangle-down-open", [1]]]  # the head is NaN, the ReLU zero


def test_a_finding_shows_its_numbers(visit: Visit) -> None:
    """The name in the verdict leads to the kind's heat map and the site's curve."""
    visit.page.locator("#verdict .problem button", has_text="net.head").first.click()
    visit.show("heat")
    visit.settle()
    assert visit.page.input_value("#heat-site") == "net.head"
    curve: list[Any] = visit.page.evaluate("document.getElementById('heat-curve').data[0].y")
    np.testing.assert_allclose(np.array(curve[:6], float), SIZES[3, :6], rtol=1e-3)


@pytest.mark.parametrize("is_parametrized", [False, True])
def test_a_profile_has_a_line_for_each_role(is_parametrized: bool, browser: Browser, tmp_path: Path) -> None:
    """Weights, biases, gains and embeddings have separate lines; so have outputs of containers, leaf modules and heads.

    A parameter from which another one is computed has the role of that one.
    """
    modules = {
        "emb": "Embedding",
        **({"emb.parametrizations": "ModuleDict", "emb.parametrizations.weight": "ParametrizationList"} if is_parametrized else {}),
        "block": "Block",
        "block.norm": "RMSNorm",
        "block.attn": "Attention",
        "block.attn.proj": "Linear",
        "out": "Linear",
    }
    makes = ".parametrizations.{}.original".format if is_parametrized else ".{}".format
    of_parameters = {
        f"emb{makes('weight')}": 1.0,
        "block.norm.weight": 2.0,
        "block.attn.proj.weight": 3.0,
        f"block.attn.proj{makes('bias')}": 4.0,
        "out.weight": 5.0,
    }
    of_outputs = {"emb": 1.0, "block": 2.0, "block.norm": 3.0, "block.attn": 4.0, "block.attn.head_0.query": 5.0, "block.attn.proj": 6.0}
    series: dict[str, list[float | None]] = {f"parameter/{name}/norm": [value] * 2 for name, value in of_parameters.items()}
    series |= {f"activation/{name}/rms": [value] * 2 for name, value in of_outputs.items()}
    infos = [ModuleInfo(name, kind, 0) for name, kind in modules.items()]
    write_report([load_store(write_store(tmp_path / "m.h5", series, modules=infos))], tmp_path / "m.html")
    visit = Visit(browser, tmp_path / "m.html")
    visit.show("profiles")
    visit.settle()
    drawn: list[dict[str, list[list[float]]]] = visit.page.eval_on_selector_all(
        "#profiles-charts .chart",
        "all => all.map(item => Object.fromEntries(item.data.filter(line => line.showlegend !== false)"
        ".map(line => [line.name, [[...line.x], [...line.y]]])))",
    )
    assert drawn == [
        {"leaf modules": [[0, 2, 5], [1, 3, 6]], "containers": [[1, 3], [2, 4]], "heads": [[4], [5]]},
        {"embeddings": [[0], [1]], "normalisation gains": [[1], [2]], "weights": [[2, 4], [3, 5]], "biases": [[3], [4]]},
    ]
    visit.page.close()


def test_every_axis_has_its_unit(visit: Visit) -> None:
    """The statistic with its unit or its kind; transitions between blocks by both ends."""
    labels: dict[str, list[str]] = {}
    for section in ("profiles", "updates", "rcc", "attention"):
        visit.show(section)
        visit.settle()
        labels[section] = visit.page.eval_on_selector_all(
            f"#{section} .chart", "all => all.filter(item => item.data[0].type === 'scatter').map(item => item.layout.yaxis.title.text)"
        )
    assert labels["profiles"] == ["rms of activation", "norm of gradient", "gain (after / before)", "ratio (update / parameter)"]
    assert labels["updates"] == ["norm of update / norm of parameter"]
    assert labels["rcc"] == ["rms of the term"] * 2 + ["alignment (at most 1)"] * 2
    assert labels["attention"] == ["mean (nats)"]
    ticks = "document.querySelectorAll('#profiles-charts .chart')[2].layout.xaxis.ticktext"
    assert visit.page.evaluate(ticks) == ["fc1 → fc2", "fc2 → head"]


def test_it_opens_on_the_first_sick_site(browser: Browser, page: Path) -> None:
    """The heat map of its kind and statistic, and its curve."""
    visit = Visit(browser, page)
    first = json.loads(visit.page.get_attribute("main", "data-first") or "")
    assert first["site"]
    visit.show("heat")
    visit.settle()
    assert json.loads(visit.page.input_value("#heat-table")) == {"kind": first["kind"], "statistic": first["statistic"]}
    assert visit.page.input_value("#heat-site") == first["site"]
    visit.page.close()


def test_histograms_open_on_a_site_with_many_bins(browser: Browser, tmp_path: Path) -> None:
    """A tensor of zeros, such as an initial bias, is a single row, which looks like an empty panel."""
    zeros = np.zeros(NUM_COUNTS, np.int64)
    zeros[1 + len(EDGES) // 2 - 1] = 5
    histograms = {"parameter/net.bias/hist": [Histogram(zeros)] * 3, "parameter/net.weight/hist": [histogram(0.3), histogram(3.0)]}
    write_report([load_store(write_store(tmp_path / "m.h5", {"loss": [1.0]}, histograms=histograms))], tmp_path / "m.html")
    visit = Visit(browser, tmp_path / "m.html")
    visit.show("histograms")
    visit.settle()
    assert visit.page.input_value("#histograms-site") == "net.weight"
    visit.page.select_option("#histograms-site", "net.bias")
    visit.settle()
    assert visit.page.input_value("#histograms-site") == "net.bias"
    visit.page.close()


def test_the_toolbar_is_not_on_the_chart(visit: Visit) -> None:
    """Its buttons are above the plot, of every chart."""
    for section in ("heat", "profiles", "attention"):
        visit.show(section)
        visit.settle()
        overlaps: list[bool] = visit.page.eval_on_selector_all(
            f"#{section} .chart",
            "all => all.map(item => item.querySelector('.modebar').getBoundingClientRect().bottom"
            " > item.querySelector('.nsewdrag').getBoundingClientRect().top + 2)",
        )
        assert overlaps
        assert not any(overlaps)


def test_the_toolbar_is_not_on_a_title(visit: Visit) -> None:
    """Of every chart with a title, also of small ones, whose bar has two buttons or none, under the pointer."""
    visit.show("heat")
    visit.show("attention")
    visit.settle()
    seen = {"whole": 0, "short": 0, "none": 0}
    for chart in visit.page.locator(".js-plotly-plot:has(.gtitle)").all():
        if not chart.is_visible():
            continue
        chart.hover()
        title, buttons = chart.locator(".gtitle").bounding_box(), [button.bounding_box() for button in chart.locator(".modebar-btn").all()]
        assert title is not None
        assert all(button is not None and button["x"] >= title["x"] + title["width"] for button in buttons)
        seen["none" if not buttons else "short" if len(buttons) == 2 else "whole"] += 1
    assert seen["whole"]
    assert seen["short"] + seen["none"]


def test_on_a_phone_nothing_is_wider_than_the_screen(browser: Browser, tmp_path: Path) -> None:
    """390 pixels: nothing scrolls sideways, and a map has almost half of the width, also with long names of sites."""
    series = everything() | {f"activation/net.a_long_name_of_a_layer.{part}.projection_of_the_value/rms": [1.0, 2.0] for part in range(20)}
    write_report([load_store(write_store(tmp_path / "m.h5", series, modules=MODULES))], tmp_path / "m.html")
    visit = Visit(browser, tmp_path / "m.html", width=390)
    for section in (name for name in SECTIONS if name != "histograms"):
        visit.show(section)
    visit.settle()
    assert visit.page.evaluate("document.documentElement.scrollWidth") == 390
    box = visit.page.locator("#heat-charts .nsewdrag").first.bounding_box()
    assert box is not None
    assert box["width"] > 170
    assert visit.complaints == []
    visit.page.close()


def test_each_panel_explains_how_to_read_it(visit: Visit) -> None:
    """In a note, for readers who do not know such charts."""
    for section in ("heat", "profiles", "updates", "rcc", "attention", "histograms", "quantiles", "spectra"):
        assert (visit.page.locator(f"#{section} .note").first.text_content() or "").startswith("How to read it: ")


def test_charts_of_heads_and_of_histograms(visit: Visit) -> None:
    """Heads in columns, values of the slider's step; shares of the elements in bins, the largest on top."""
    visit.show("attention")
    visit.settle()
    heads: list[list[float]] = visit.page.evaluate("document.querySelector('#attention-charts .chart').data[0].z.map(row => [...row])")
    assert heads == [[11.0, 12.0, 13.0]]
    visit.show("histograms")
    visit.settle()
    rows: list[str] = visit.page.evaluate("document.querySelector('#histograms-charts .chart').cells.names")
    assert [rows[0], rows[-1]] == ["[2, 4)", "(-4, -2]"]
    words: str = visit.page.evaluate("document.querySelector('#histograms-charts .chart').describe(0, 1)")
    assert words == "[2, 4)\nstep 10\n50 % of the elements\nand 1 elements that are not finite"


def test_quantiles_are_bands(visit: Visit) -> None:
    """From the widest to the narrowest, and the median as a line; a site without bands has the line, and marks for what is not finite."""
    visit.show("quantiles")
    visit.settle()
    chart = "document.querySelector('#quantiles-charts .chart').data"
    assert visit.page.evaluate(f"{chart}.map(trace => trace.name)") == [
        "p01",
        "p01 to p99",
        "p05",
        "p05 to p95",
        "p25",
        "p25 to p75",
        "median",
    ]
    assert visit.page.evaluate(f"{chart}.map(trace => trace.y[1])") == [-6, 6, -4, 4, -2, 2, 0]
    assert visit.page.evaluate(f"{chart}.map(trace => trace.fill === 'tonexty')") == [False, True] * 3 + [False]
    visit.page.select_option("#quantiles-site", "net.fc2.weight")
    visit.settle()
    lines: list[list[float | None]] = visit.page.evaluate(f"{chart}.map(trace => [...trace.y])")
    assert [line[:3] for line in lines] == [[0.5, None, 0.25], [0.5]]
    assert not visit.complaints


def test_singular_values_of_a_site_are_one_chart(visit: Visit) -> None:
    """A line for each value, with its residual, and a gap where it is not known; first a site that has all values. No other chart has them.

    A press on a site's name, as of a value that differs between runs, shows the chart.
    """
    visit.show("spectra")
    visit.settle()
    assert visit.page.input_value("#spectra-site") == "net.fc2.weight"
    chart = "document.querySelector('#spectra-charts .chart').data"
    drawn: list[Any] = visit.page.evaluate(f"{chart}.map(({{ name, x, y }}) => [name, [...x].slice(0, 4), [...y].slice(0, 4)])")
    assert drawn[:3] == [
        ["singular_value_1", [0, 10, 20, 30], [7, 14, 21, 28]],
        ["singular_value_2", [0, 10, 20, 30], [4, 8, 12, 16]],
        ["singular_value_3", [0, 10, 20, 30], [1, None, None, 4]],
    ]
    assert [marks[1] for marks in drawn[3:]] == [[20]]  # a cross where the matrix was not finite, none where the value was not found
    assert visit.page.evaluate(f"{chart}[1].text[3]") == "singular_value_2<br>step 30: 16, residual 0.5"
    visit.page.evaluate("showSeries({ kind: 'parameter', statistic: 'singular_value_1', site: 'net.fc1.weight' })")
    visit.settle()
    assert visit.page.input_value("#spectra-site") == "net.fc1.weight"
    assert visit.page.evaluate(f"{chart}.map(({{ name }}) => name)") == ["singular_value_1"]
    others: list[str] = visit.page.eval_on_selector_all("#heat-table option", "all => all.map(({ text }) => text)")
    assert "gradient, norm" in others
    assert not [name for name in others if "singular_value" in name or "residual" in name]
    assert not visit.complaints


def test_a_singular_value_between_two_gaps_is_a_mark(browser: Browser, tmp_path: Path) -> None:
    """Also of a long run, whose lines have no marks."""
    values: list[float | None] = [UNDEFINED] * 70
    values[35] = 1.0
    series: dict[str, list[float | None]] = {
        f"parameter/w/{name}_{rank}": [2.0] * 70 for rank in (1, 2) for name in ("singular_value", "residual")
    }
    series["parameter/w/singular_value_2"] = values
    visit = Visit(browser, write_report(write_store(tmp_path / "m.h5", series)))
    visit.show("spectra")
    modes = visit.page.evaluate("document.querySelector('#spectra-charts .chart').data.map(({ mode }) => mode)")
    assert modes == ["lines", "lines+markers"]
    assert not visit.complaints
    visit.page.close()


def test_the_theme_follows_the_button(visit: Visit) -> None:
    """Light with a light system, dark after a click; charts too."""
    visit.show("heat")
    assert ground(visit) == "rgb(245, 246, 248)"
    visit.page.click("#theme")
    visit.settle()
    assert ground(visit) == "rgb(18, 22, 28)"
    assert visit.page.evaluate("document.querySelector('#heat-charts .chart').layout.font.color") == "#e6eaf0"
    visit.page.click("#theme")


def ground(visit: Visit) -> str:
    """The page's colour."""
    background: str = visit.page.evaluate("getComputedStyle(document.body).backgroundColor")
    return background


def test_many_sites_are_grouped_by_module(browser: Browser, tmp_path: Path) -> None:
    """400 sites are 40 rows, each with the largest value of its group; a click shows a group's sites; an option shows all sites."""
    series: dict[str, list[float | None]] = {
        f"activation/model.layers.{layer}.part{part}/rms": [float(layer + 1), float(100 * part + 1)]
        for layer in range(40)
        for part in range(10)
    }
    write_report([load_store(write_store(tmp_path / "m.h5", series))], tmp_path / "m.html")
    visit = Visit(browser, tmp_path / "m.html")
    visit.show("heat")
    visit.settle()
    assert names_of_rows(visit) == [f"model.layers.{layer}" for layer in range(40)]
    words: str = visit.page.evaluate("document.querySelector('#heat-charts .chart').describe(7, 1)")
    assert words == "model.layers.7 (largest of 10 sites)\nstep 10\nrms 901"
    visit.page.evaluate("document.querySelector('#heat-charts .chart').pick(7)")
    visit.settle()
    assert names_of_rows(visit) == [f"model.layers.7.part{part}" for part in range(10)]
    visit.page.fill("#search", "")
    visit.page.wait_for_timeout(250)
    visit.page.select_option("#heat-group", "0")
    visit.settle()
    assert len(names_of_rows(visit)) == 400
    assert visit.complaints == []
    visit.page.close()


def test_a_page_without_a_heat_map_works(browser: Browser, tmp_path: Path) -> None:
    """For a run without values of its model the verdict is unknown, and the button works."""
    write_report([load_store(write_store(tmp_path / "m.h5", {"loss": [1.0]}))], tmp_path / "m.html")
    visit = Visit(browser, tmp_path / "m.html")
    visit.page.locator("#theme").click()
    assert visit.page.locator("#theme").inner_text() == "Light"
    assert "unknown" in visit.page.locator(".banner").inner_text()
    assert visit.complaints == []


def test_runs_side_by_side_and_their_difference(browser: Browser, comparison: Path) -> None:
    """A map for each run and one of the difference of sites in both; the table shows the sites that matched."""
    visit = Visit(browser, comparison, dark=True)
    assert_it_draws_alone(visit, comparison)
    assert ground(visit) == "rgb(18, 22, 28)"
    titles = visit.page.eval_on_selector_all("#heat-charts .chart", "all => all.map(item => item.layout.title.text)")
    assert titles == ["before", "after", "after against before"]
    headings = visit.page.eval_on_selector_all("#match h2, #match h3", "all => all.map(item => item.textContent)")
    expected = ["Comparison", "Options that differ", "Sites that matched", "Largest differences of after to before"]
    assert headings == expected
    assert visit.page.locator("#match table").first.inner_text().split() == ["option", "before", "after", "every_n_steps", "10", "20"]
    charts = glance_of(visit)
    assert charts["loss"] == {"before: loss": 2.0, "before: val_loss": 1.5, "after: loss": 4.0, "after: val_loss": 3.0}
    rates = {"before: lr": 0.1, "before: lr_1": 0.2, "after: lr": 0.2, "after: lr_1": 0.4}
    assert charts["learning rate"] == pytest.approx(rates, rel=1e-3)
    above = "document.querySelectorAll('#heat-charts .chart')"
    ranges = visit.page.evaluate(f"[...{above}].slice(0, 2).map(item => item._fullLayout.yaxis2.range)")
    assert ranges[0] == ranges[1]
    low, high = np.power(10, ranges[0])
    assert low < 2 / NUM_STEPS  # the least loss of the first run
    assert high > 4  # the largest of the second
    difference: list[list[float | None]] = visit.page.evaluate(
        "document.querySelectorAll('#heat-charts .chart')[2].data[0].z.map(row => [...row].map(x => Number.isFinite(x) ? x : null))"
    )
    rows = dict(zip(names_of_rows(visit), difference, strict=True))
    np.testing.assert_allclose(np.array(rows["net.fc1"], float), 1.0, atol=1e-3)  # twice the size: log2 is 1
    assert rows["net.fc2"] == rows["net.new"] == [None] * NUM_STEPS
    assert rows["net.relu"][-1] == 0.0  # zero in both
    cells = visit.page.eval_on_selector_all("#match tbody tr", "all => all.map(item => item.innerText)")
    (activation,) = [cell for cell in cells if cell.startswith("activation\t")]
    assert activation.split("\t")[:2] == ["activation", "4"]  # net.fc2 has its mean in both
    assert "1 of its 5 not in all" in activation
    visit.page.close()


def test_the_picture_of_the_readme(browser: Browser, page: Path, tmp_path: Path) -> None:
    """The program that takes it works, and the committed picture is not too large."""
    command = [sys.executable, str(DOCS / "report_picture.py"), str(page), str(tmp_path / "report.png")]
    subprocess.run(command, check=True)
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert (DOCS / "report.png").stat().st_size < 300_000
