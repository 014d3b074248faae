"""The report: its figures are those of the artefacts, it runs and fetches nothing, and a real Chromium shows it."""

from __future__ import annotations

import html.parser
import http.server
import json
import re
import shlex
import shutil
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
import small_graphs
import torch
import yaml
from conftest import save_tiny
from debian_packages import install
from onnx import TensorProto

import repaconv as rc
from repaconv.cli.installation_and_demo_commands import run_demo, run_trained_networks
from repaconv.cli.main import main
from repaconv.core.errors import UsageProblem
from repaconv.models import METHODS
from repaconv.results import Accuracy, BenchArtefact, ReportRow
from repaconv.stages.bench.latency_baselines import key_of
from repaconv.stages.report import page_rendering as page
from repaconv.stages.report.tradeoff_plots import pareto_svg

RUN = Path("repaconv-out/tiny")
PHONE, DESK = 390, 1280


class Seen(html.parser.HTMLParser):
    """Tags, attributes, and the figures that are marked."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.figures: dict[str, str] = {}
        self.open = ""

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.open = dict(attrs).get("data-figure", "") or ""

    def handle_data(self, data):
        if self.open:
            self.figures[self.open] = data
            self.open = ""


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Path:
    """A folder with a run of every stage."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as there:
        there.chdir(folder)
        whole_run(save_tiny(folder))
    return folder


@pytest.fixture
def whole(measured, monkeypatch) -> None:
    """The test runs where that run is, and adds no more than reports."""
    monkeypatch.chdir(measured)


def whole_run(tiny: Path) -> None:
    np.savez("pair.npz", input=np.random.default_rng(0).standard_normal((2, 3, 32, 32)).astype(np.float32))
    rc.fold(tiny)
    rc.export()
    rc.export(precision="int8")
    rc.verify(inputs="pair.npz", drift=True)
    rc.build(target="x86-64")
    rc.bench(rounds=25, profile=True)
    rc.bench(rounds=25, profile=True)


def seen(path: Path) -> Seen:
    found = Seen()
    found.feed(path.read_text())
    return found


def test_figures_are_the_artefacts_and_nothing_runs_or_is_fetched(whole, repaconv):
    done = rc.report()
    text = (RUN / "report.html").read_text()
    found = seen(RUN / "report.html")
    result = json.loads((RUN / "bench/x86-64.json").read_text())
    folded = json.loads((RUN / "fold.json").read_text())
    links = json.loads((RUN / "verify.json").read_text())["links"]
    assert found.figures["parameters.deploy"] == f"{folded['deploy']['parameters']:,}"
    assert found.figures["macs.training"] == f"{folded['training']['macs']:,}"
    assert found.figures["p50.x86-64"] == f"{result['latencies'][0]['p50_ms']:.3f}"
    assert found.figures["ratio.x86-64"] == BenchArtefact.model_validate(result).compared
    assert found.figures["peak.x86-64"] == f"{result['profile']['share_of_peak']:.1%}"
    for number, link in enumerate(links):
        if link["metrics"]:
            assert found.figures[f"link.{number}"] == f"{link['metrics']['max_rel_error']:.1e}"
    assert not [tag for tag, _ in found.tags if tag in ("script", "iframe", "object", "embed", "form")]
    for _, attributes in found.tags:
        for name, value in attributes.items():
            assert not name.startswith("on"), name
            assert name not in ("src", "href", "action") or (value or "").startswith("data:"), value
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert "url(" not in text
    assert "default-src &#39;none&#39;" in text or "default-src 'none'" in text
    assert text.count("<svg") >= 4
    assert done.commands[0].startswith("repaconv fold tiny.pth")
    assert "repaconv verify --inputs pair.npz --drift" in done.commands
    assert "no recorded output of the original code was compared" in " ".join(done.open)
    assert any(line.startswith("int8 is not verified (") for line in done.open)  # it ran, on random images
    code, out, _ = repaconv("report", "--format", "json", "--no-paper")
    assert code == 0
    plain = json.loads(out)["data"]
    assert plain["benches"][0]["latencies"][0]["p50_ms"] == result["latencies"][0]["p50_ms"]
    assert json.loads((RUN / "report.json").read_text())["links"] == plain["links"]
    assert repaconv("report", "--format", "markdown", "-o", "page.md", "--no-paper")[0] == 0
    assert f"{result['latencies'][0]['p50_ms']:.3f}" in Path("page.md").read_text()


def test_an_onnx_model_is_compared_with_its_original_and_lacks_no_output_of_other_code(repaconv):
    ends = {"x": (TensorProto.FLOAT, ["n", 3, 8, 8])}, {"y": (TensorProto.FLOAT, ["n", 4, 6, 6])}
    small_graphs.saved("net.onnx", [("Conv", "x w", "y", {})], {"w": (4, 3, 3, 3)}, *ends)
    rc.fold("net.onnx")
    rc.export()
    verified = rc.verify()
    assert list(verified.for_scale) == ["original in float32 against float64"]
    assert {link.reference for link in verified.links} == {"original, float64"}
    measured = rc.bench(rounds=2)
    assert [row.name for row in measured.latencies] == ["folded", "original"]
    assert "folded (fp32)" in measured.compared
    assert "beside training form" in key_of("net", measured)  # so that earlier baselines are still found
    assert not [line for line in rc.report().open if "recorded output" in line]


def test_a_bare_run_says_what_is_missing(tiny):
    rc.fold(tiny)
    done = rc.report(paper=False)
    message = " ".join(done.open)
    assert "these weights were not verified" in message
    assert "there is no ONNX model" in message
    assert "no latency was measured" in message
    assert done.paper is None
    with pytest.raises(UsageProblem, match="no format"):
        rc.report(format="pdf")


def test_names_from_a_checkpoint_are_text_and_not_markup(tiny):
    rc.fold(tiny)
    path = RUN / "fold.json"
    plain = json.loads(path.read_text())
    plain["certificate"][0]["module"] = "<script>alert(1)</script>"
    plain["origin"]["path"] = "/x/<img src=q onerror=alert(2)>.pth"
    path.write_text(json.dumps(plain))
    rc.report(paper=False)
    text = (RUN / "report.html").read_text()
    assert "<script>" not in text
    assert "<img" not in text
    assert "&lt;script&gt;" in text


def test_the_history_joins_what_was_measured_alike(tiny):
    rc.fold(tiny)
    rc.export()
    for size, batch in ((None, None), (None, 2), (64, None), (None, None)):
        rc.bench(rounds=3, image_size=size, batch=batch)
    from repaconv.stages.bench.latency_baselines import history_of

    entries = history_of(RUN / "history-x86-64.jsonl")
    entries.append(entries[0].model_copy(update={"machine": "another"}))
    svg = page.history_svg(entries)
    assert svg.count("<circle") == 5
    assert sorted(line.count(",") for line in re.findall(r'<polyline points="(.*?)"', svg)) == [1, 1, 1, 2]
    assert "another</text>" in svg
    assert 'fill="none" stroke="#2563eb"><title>' in svg  # three rounds are no measurement to be trusted
    assert page.history_svg(entries[:1]).count("<text") == 4  # three ticks and a day: one way needs no name


def test_the_report_joins_what_is_of_the_present_graphs_and_its_commands_make_them_again(tiny_weights):
    other = {name: value + 1 if value.is_floating_point() else value for name, value in tiny_weights.items()}
    Path("w").mkdir()
    torch.save({"model": other, "model_ema": tiny_weights, "args": {"img_size": 32}}, "w/two.pth")
    rc.fold("w/two.pth", weights="model", out="run")
    run = Path("run")
    rc.export(image_size=32)
    rc.verify(rtol={"onnx": 1e-4}, count=2, seed=3)
    rc.bench(rounds=3, image_size=32, against=run / "model.32x32.onnx", seed=5)
    first = rc.report(format="json", paper=False)
    assert first.verdict == "passed"
    assert [link.verdict for link in first.links if link.name == "onnx" and link.sha256] == ["passed"]
    assert first.commands == (
        "repaconv fold w/two.pth --method riformer --weights model -o run",
        "repaconv export --image-size 32",
        "repaconv verify --count 2 --seed 3 --rtol onnx:0.0001",
        "repaconv bench --against run/model.32x32.onnx --image-size 32 --rounds 3 --seed 5",
        "repaconv report",
    )

    graph, weights = (run / "model.32x32.onnx").read_bytes(), (run / "model.safetensors").read_bytes()
    (run / "model.32x32.onnx").write_text("rubbish")
    (run / "model.safetensors").unlink()
    edited = rc.report(format="json", paper=False)
    assert edited.verdict == "failed"
    assert ["is missing" in message or "its hash differs" in message for message in edited.open[:2]] == [True, True]
    (run / "model.32x32.onnx").write_bytes(graph)
    (run / "model.safetensors").write_bytes(weights)

    rc.export(image_size=32, simplify=False)  # in the place of the one before
    after = rc.report(format="json", paper=False)
    assert (after.benches, [link for link in after.verified.links if link.name == "onnx"]) == ((), [])
    message = "; ".join(after.open)
    assert "the latency of x86-64.32x32 is of a file that the run no longer has" in message
    assert "the link onnx of ONNX under ONNX Runtime, 32x32 is of a file that the run no longer has" in message
    assert "model.32x32.onnx was exported after the verification" in message
    assert "repaconv export --image-size 32 --no-simplify" in after.commands

    for line in first.commands[:2]:
        with pytest.raises(SystemExit) as left:
            main(shlex.split(line)[1:])
        assert not left.value.code
    again = rc.report(format="json", paper=False)
    assert (again.folded.payload, again.exports[0].payload) == (first.folded.payload, first.exports[0].payload)


# --- a real browser ---------------------------------------------------------------------------------------


def chromium() -> str | None:
    """The machine's own; on a CI machine Debian's package is installed."""
    names = ("chromium", "chromium-browser", "google-chrome")
    if not any(map(shutil.which, names)):
        install("chromium")
    return next(filter(None, map(shutil.which, names)), None)


class Served(http.server.SimpleHTTPRequestHandler):
    """Remembers what was asked for."""

    asked: list[str] = []  # noqa: RUF012

    def log_message(self, format, *args):
        self.asked.append(self.path)


FRAME = """<!doctype html><title>frame</title><iframe id=f width={width} height=900 src=report.html></iframe>
<pre id=told></pre><script>
f.onload = () => {{
  const page = f.contentDocument, root = page.documentElement;
  const wide = [...page.querySelectorAll('body *')].filter(
    e => !e.closest('.scroll') && !e.closest('pre') && e.getBoundingClientRect().right > {width} + 1);
  told.textContent = JSON.stringify({{
    scroll: root.scrollWidth, headings: page.querySelectorAll('h2').length, svgs: page.querySelectorAll('svg').length,
    wide: wide.map(e => e.tagName),
    cut: [...page.querySelectorAll('caption, h2 + .scroll [data-figure^=link]')].filter(
      e => e.getBoundingClientRect().right > {width}).length,
    boxes: [...page.querySelectorAll('table')].every(e => getComputedStyle(e.parentElement).overflowX == 'auto'),
    paper: getComputedStyle(page.body).backgroundColor
  }});
}};
</script>"""


@pytest.fixture
def browse():
    """(page, width, dark) -> what that page is like, and what the browser's console says."""
    browser = chromium()
    if browser is None:
        pytest.skip("there is no Chromium")
    Served.asked = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Served)
    threading.Thread(target=server.serve_forever).start()
    options = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    options += " --disable-component-update --disable-sync --enable-logging=stderr --virtual-time-budget=8000"

    def look(report: Path, width: int, *, dark: bool = False):
        shutil.copy(report, "report.html")
        Path("frame.html").write_text(FRAME.format(width=width))
        more = ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if dark else []
        command = [browser, *options.split(), *more, f"--user-data-dir={Path('profile').resolve()}"]
        place = f"http://127.0.0.1:{server.server_port}/frame.html"
        done = subprocess.run([*command, "--dump-dom", place], capture_output=True, text=True, timeout=120, check=False)
        found = re.search(r'<pre id="told">(.*?)</pre>', done.stdout, flags=re.S)
        assert found, done.stderr[-2000:]
        console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
        return json.loads(found[1].replace("&quot;", '"')), console

    yield look
    server.shutdown()
    server.server_close()


def looked_at(browse, run: Path) -> None:
    """A page without an error, as wide as its window, that asks for nothing."""
    for width in (PHONE, DESK):
        found, console = browse(run / "report.html", width)
        assert console == []
        assert found["scroll"] <= width, found
        assert found["wide"] == []
        assert (found["cut"], found["boxes"]) == (0, True)  # a link's error is seen before its box is scrolled
        assert found["headings"] >= 5
        assert found["svgs"] >= 2
    assert found["paper"] == "rgb(255, 255, 255)"
    dark, _ = browse(run / "report.html", DESK, dark=True)
    assert dark["paper"] in ("rgb(13, 17, 23)", found["paper"])
    assert set(Served.asked) <= {"/frame.html", "/report.html", "/favicon.ico"}


def test_chromium_shows_it_on_a_phone_and_on_a_desk(browse, whole):
    rc.report()
    looked_at(browse, RUN)


@pytest.mark.slow
def test_chromium_shows_the_demo_and_the_figures_are_its_own(browse):
    assert run_demo("s12", Path("demo"), 20, quiet=True) == 0
    run = Path("demo/s12")
    looked_at(browse, run)
    result = json.loads((run / "bench/x86-64.json").read_text())
    assert seen(run / "report.html").figures["p50.x86-64"] == f"{result['latencies'][0]['p50_ms']:.3f}"
    assert seen(run / "report.html").figures["ratio.x86-64"] == BenchArtefact.model_validate(result).compared


def test_links_of_other_variants_are_counted_and_folded_away(whole):
    """The float32 export was measured and built, the int8 one was not."""
    page = rc.report()
    other = [link for link in page.links if link.variant == "int8"]
    assert other
    assert [page.links[place] for place in page.others] == [link for link in other if link.verdict != "failed"]
    text = (RUN / "report.html").read_text()
    before, _, rest = text.partition("<summary>" + page.others_text)
    assert rest
    assert page.others_text.startswith(
        f"{len(page.others)} links of exports that were neither built nor measured (int8):"
    )
    assert rest.partition("</details>")[0].count("<tr>") == len(page.others) + 1  # and the head
    chain = before.partition("Verification chain")[2]
    assert chain.count("<tr>") == len(page.links) - len(page.others) + 1
    for format in ("markdown", "card"):
        rc.report(format=format)
        table = (RUN / {"markdown": "report.md", "card": "README.md"}[format]).read_text()
        assert page.others_text in table
        rows = [line for line in table.splitlines() if line.startswith("| ") and ", float64 |" in line]
        assert not [row for row in rows if "| int8 |" in row]
    failed = page.model_copy(
        update={"links": tuple(link.model_copy(update={"verdict": "failed"}) for link in page.links)}
    )
    assert (failed.others, failed.others_text) == ((), "")  # what failed is never folded away
    measured = page.exports[-1]
    assert measured.variant == "int8"
    low = page.benches[0].latencies[0].model_copy(update={"sha256": measured.payload.sha256})
    chosen = page.model_copy(update={"benches": (page.benches[0].model_copy(update={"latencies": (low,)}),)})
    assert chosen.others == ()  # int8, and float32 with which it is compared


# --- several runs ---------------------------------------------------------------------------------------


def test_a_model_card_has_verification_and_provenance_and_leaves_the_license(repaconv, tiny):
    rc.fold(tiny, out="one")
    rc.verify("one")
    code, out, _ = repaconv("report", "one", "--format", "card")
    assert (code, "one/README.md" in out) == (0, False)
    text = Path("one/README.md").read_text()
    header = yaml.safe_load(text.split("---")[1])
    assert header == {"pipeline_tag": "image-classification", "tags": ["repaconv", "riformer"]}
    folded = rc.report("one", format="json", paper=False).folded
    for message in (folded.origin.sha256, folded.payload.sha256, "| passed | stored |", "No latency", "## License"):
        assert message in text
    assert repaconv("report", "one", "--format", "card")[0] == 0  # its own, so it may be written again
    assert repaconv("report", "one", "one", "--format", "card")[0] == 2
    Path("one/README.md").write_text("mine")
    assert repaconv("report", "one", "--format", "card")[0] == 2


def test_several_runs_are_shown_next_to_each_other(repaconv, tiny):
    images = np.random.default_rng(0).standard_normal((4, 3, 32, 32)).astype(np.float32)
    np.savez("labelled.npz", input=images, labels=np.arange(4) % 5)
    for name in ("one", "two"):
        rc.fold(tiny, out=name)
        rc.verify(name, inputs="labelled.npz")
    rc.report("one")
    code, out, _ = repaconv("report", "one", "two")
    assert code == 0
    assert re.search(r"one +passed", out)
    text = Path("runs.html").read_text()
    assert '<a href="one/report.html">one</a>' in text
    assert "<td>two</td>" in text
    assert "http" not in text.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")
    row = rc.compare_runs(["one", "two"], format="json").rows[1]
    assert row.accuracy.images == 4
    assert row.worst_fold <= 1e-12 < row.worst_single <= 1e-5
    assert json.loads(Path("runs.json").read_text())["rows"][0]["page"] == "one/report.html"
    assert "| two | passed |" in Path(rc.compare_runs(["one", "two"], format="markdown").output_files[0]).read_text()
    Path("runs.html").write_text("mine")
    assert repaconv("report", "one", "two")[0] == 2
    assert repaconv("report", "one", "one")[0] == 2
    assert repaconv("report", "one", "two", "--no-paper")[0] == 2


def test_what_nothing_beats_is_bold_in_the_picture():
    def row(title, ms, accuracy):
        found = Accuracy(
            images=9, reference=1, candidate=accuracy, only_reference=0, only_candidate=0, difference=0, low=0, high=0,
            p_value=1,
        )  # fmt: skip
        plain = {"called": "", "page": "", "verdict": "passed", "open": 0, "worst_fold": 0, "worst_single": None}
        return ReportRow(
            title=title, accuracy=found, saved=(), lower=(), target="here", after_ms=ms, before_ms=9.0, **plain
        )

    picture = pareto_svg([row("fast", 1, 0.8), row("right", 3, 0.9), row("beaten", 2, 0.8)])
    bold = {name: weight for weight, name in re.findall(r'font-weight="(\w+)"[^>]*>(\w+)<', picture)}
    assert bold == {"fast": "bold", "right": "bold", "beaten": "normal"}
    assert pareto_svg([row("alone", 1, 0.8)]) == ""


@pytest.mark.slow
def test_the_demo_compares_five_trained_networks(browse):
    assert run_trained_networks(Path("demo"), 20, quiet=True) == 0
    found, console = browse(Path("demo/index.html"), PHONE)
    assert (console, found["wide"], found["svgs"]) == ([], [], 1)
    assert found["scroll"] <= PHONE
    rows = rc.compare_runs([f"demo/{name}" for name in METHODS], format="json").rows
    assert [row.title for row in rows] == list(METHODS)
    for row in rows:
        assert row.accuracy.candidate >= 0.98
        assert dict(row.lower)["int8"] >= 0.98
