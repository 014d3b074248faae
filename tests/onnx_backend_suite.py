"""A program that folds ONNX's backend test models one after the other.

It is a program because a crash of a runtime ends its process. It writes a line of JSON before and one after each model.
`tests/test_onnx_backend_suite.py` starts it and reads the lines.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx

KINDS = ("node", "simple", "pytorch-converted", "pytorch-operator")


def cases() -> list[Any]:
    """All test cases that hold their model, by name."""
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [case for kind in KINDS for case in load_model_tests(kind=kind)]
    return sorted((case for case in found if case.model or case.model_dir), key=lambda case: (case.kind, case.name))


def model_of(case: Any) -> onnx.ModelProto:
    """The model of a case."""
    return case.model or onnx.load(Path(case.model_dir) / "model.onnx")


def recorded(case: Any, model: onnx.ModelProto) -> list[tuple[list[Any], list[Any]]]:
    """Its recorded inputs and outputs, as arrays and lists."""
    if not case.model_dir:
        return [([_array(one) for one in given], [_array(one) for one in right]) for given, right in case.data_sets]
    folders = sorted(Path(case.model_dir).glob("test_data_set_*"))
    return [
        (_read(folder, "input", model.graph.input), _read(folder, "output", model.graph.output)) for folder in folders
    ]


def _read(folder: Path, what: str, values: Any) -> list[Any]:
    from onnx import numpy_helper

    found = []
    for place, value in enumerate(values):
        file = folder / f"{what}_{place}.pb"
        if not file.is_file():
            break
        if value.type.HasField("sequence_type"):
            found.append(numpy_helper.to_list(onnx.SequenceProto.FromString(file.read_bytes())))
        elif value.type.HasField("optional_type"):
            found.append(numpy_helper.to_optional(onnx.OptionalProto.FromString(file.read_bytes())))
        else:
            found.append(numpy_helper.to_array(onnx.TensorProto.FromString(file.read_bytes())))
    return found


def _array(given: Any) -> Any:
    from onnx import numpy_helper

    if isinstance(given, onnx.TensorProto):
        return numpy_helper.to_array(given)
    return np.asarray(given) if isinstance(given, np.generic) else given


def differs(model: onnx.ModelProto, case: Any, data: list[tuple[list[Any], list[Any]]]) -> str:
    """What is wrong about what ONNX Runtime makes of it; empty where it gives the recorded outputs."""
    import onnxruntime
    from onnx.backend.test.runner import Runner

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level, settings.intra_op_num_threads = 4, 1
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
        names = [value.name for value in session.get_inputs()]
        for given, right in data:
            found = session.run(None, dict(zip(names, given, strict=False)))
            Runner.assert_similar_outputs(right, found, case.rtol, case.atol)
    except Exception as error:  # the runtime's own, of many classes
        return f"{type(error).__name__}: {str(error).strip()[:300]}"
    return ""


def folded(case: Any, folder: Path) -> dict[str, str]:
    """What became of a case: ``result`` and why."""
    import repaconv
    from repaconv.core.errors import RepaconvError

    model = model_of(case)
    data = recorded(case, model)
    if why := differs(model, case, data):
        return {"result": "not run as expected", "why": why}
    source = folder / "model.onnx"
    onnx.save(model, source)
    try:
        repaconv.fold(source, out=folder / "run", measure=False)
    except RepaconvError as error:
        return {"result": "refused", "code": error.code, "why": error.message, "hint": error.hint}
    except Exception as error:  # what must not happen
        return {"result": "internal error", "why": f"{type(error).__name__}: {error}"}
    if why := differs(onnx.load(folder / "run" / "model.folded.onnx"), case, data):
        return {"result": "wrong", "why": why}
    return {"result": "the same"}


def main(start: int, step: int, skip: list[str]) -> None:
    """Every ``step``-th case from ``start`` on, but those of these names."""
    for case in cases()[start::step]:
        if case.name in skip:
            continue
        tell({"begins": case.name})
        with tempfile.TemporaryDirectory() as folder:
            tell({"name": case.name, **folded(case, Path(folder))})


def tell(line: dict[str, str]) -> None:
    """One line, at once."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
