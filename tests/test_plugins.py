"""Our own methods fulfill the plug-in contract, and so does a third party's method that pip installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from conftest import one_net_a_method

from repaconv.methods.nondeep.published_models import example_meta
from repaconv.testing import check_method, write_example

HERE = Path(__file__).parent
OWN = [
    ("repavit", "tiny", {"num_heads": "3"}, None),
    ("repavit", "tiny-swin", {}, None),
    ("repavit", "tiny-poolformer", {"pool_size": "3"}, None),
    ("repavit", "tiny-mixer", {}, None),
    ("nondeep", "tiny", {}, example_meta()),
    ("dwconv", "tiny", {"num_heads": "3"}, None),
    ("pyra", "tiny", {"num_heads": "3"}, None),
    ("repconv", "tiny-repvgg", {"image_size": "32"}, None),
    ("repconv", "tiny-mobileone", {"image_size": "32"}, None),
]


@pytest.mark.parametrize(("name", "arch", "settings", "meta"), one_net_a_method(OWN, later=("pyra", "dwconv")))
def test_our_own_methods_hold_the_contract(name, arch, settings, meta, tmp_path):
    check_method(name, arch, tmp_path, settings=settings, meta=meta)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder into which pip has installed the toy as a package of its own."""
    folder = tmp_path_factory.mktemp("site")
    wheel = folder / "toy_plugin-1.0-py3-none-any.whl"
    points = "[repaconv.methods]\ntoy = toy_plugin:METHOD\n[repaconv.backbones]\ntoy = toy_plugin:BACKBONE\n"
    info = {
        "METADATA": "Metadata-Version: 2.1\nName: toy-plugin\nVersion: 1.0\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "entry_points.txt": points,
    }
    names = ["toy_plugin.py", *(f"toy_plugin-1.0.dist-info/{name}" for name in (*info, "RECORD"))]
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(HERE / "toy_plugin.py", "toy_plugin.py")
        for name, text in info.items():
            archive.writestr(f"toy_plugin-1.0.dist-info/{name}", text)
        archive.writestr("toy_plugin-1.0.dist-info/RECORD", "".join(f"{name},,\n" for name in names))
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--target",
        str(folder / "packages"),
        str(wheel),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "packages"


@pytest.fixture
def installed(site, tmp_path) -> dict[str, str]:
    """An environment that has these packages, in a folder of the test's own."""
    own = shutil.copytree(site, tmp_path / "site")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(own), *filter(None, [os.environ.get("PYTHONPATH")])])}


def test_a_third_partys_method_is_found_folds_and_holds_the_contract(installed):
    code = "from pathlib import Path; from repaconv.testing import check_method, write_example; "
    code += "check_method('toy', 'small', Path('.')); write_example('toy', 'small', Path('toy.pth'), 2); "
    code += "from repaconv.cli.main import main; main(['fold', 'toy.pth', '--format', 'json'])"
    fold = subprocess.run([sys.executable, "-c", code], env=installed, capture_output=True, text=True)
    assert json.loads(fold.stdout)["data"]["method"] == "toy", fold.stderr


def test_a_broken_plugin_is_a_row_and_no_crash(installed):
    site = Path(installed["PYTHONPATH"].split(os.pathsep)[0])
    (site / "toy_plugin.py").write_text("raise RuntimeError('half installed')\n")
    (site / "tensorrt.py").write_text("raise OSError('libnvinfer.so.10: cannot open shared object file')\n")
    cli = [sys.executable, "-m", "repaconv"]
    doctor = subprocess.run([*cli, "doctor"], env=installed, capture_output=True, text=True)
    assert "toy_plugin:METHOD" in doctor.stdout
    assert "half installed" in doctor.stdout
    whole = subprocess.run([*cli, "doctor", "-v"], env=installed, capture_output=True, text=True)
    assert "OSError: libnvinfer.so.10: cannot open shared object file" in " ".join(whole.stdout.split())
    assert "Traceback" not in doctor.stderr
    (site / "toy_plugin.py").write_text("METHOD = BACKBONE = object()  # of another version's contract\n")
    write_example("repavit", "tiny", Path("r.pth"), 2)
    code = "import repaconv; assert repaconv.fold('r.pth', num_heads=3).verdict == 'passed'; "
    code += "from repaconv.cli.main import main; main(['fold', 'r.pth', '--method', 'toy'])"
    named = subprocess.run([sys.executable, "-c", code], env=installed, capture_output=True, text=True)
    assert named.returncode == 3
    assert "method.broken" in named.stderr
