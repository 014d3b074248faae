"""The forms of one network, each written once: what a search chooses among."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from repaconv.errors import Refused
from repaconv.files import sha256_of_bytes, write_bytes
from repaconv.forms.choice import chosen
from repaconv.progress import Progress
from repaconv.subjects.subject import DEPLOY, GraphSpec, Subject

if TYPE_CHECKING:
    import onnx

    from repaconv.forms.search import Form
    from repaconv.graphs.contract import Rewrite
    from repaconv.proof.data import Batch
    from repaconv.targets import Target


@dataclass
class Candidates:
    """The forms of one network as files, each made once; ``judging`` is what they are compared on."""

    raw: onnx.ModelProto
    rewrites: dict[str, Rewrite]
    default: Form
    judging: Batch
    folder: Path
    made: dict[Form, Path] = field(default_factory=dict)
    counted: dict[Form, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        subject: Subject,
        device: Target,
        names: Sequence[str],
        scratch: Path,
        progress: Progress,
    ) -> Candidates:
        """Export, and find out which of these rewrites change this graph.

        Raises:
            Refused: If the export is not sound or its weights take more than 2 GiB.
        """
        from repaconv.graphs.graph import rewritten

        folded, known = subject.folded, chosen(names, device.newest_opset or device.opset).rewrites
        spec = GraphSpec(
            size=folded.image_size,
            opset=device.opset,
            newest=device.newest_opset,
            lacks=device.lacks,
            free_size=folded.any_image_size,
            simplifiers=(),
        )
        graph = subject.graph(DEPLOY, spec, scratch=scratch, progress=progress)
        if graph.data is not None or not graph.sound:
            raise Refused(
                "the weights take more than 2 GiB." if graph.data else "the exported graph does not compute the fold.",
                hint="tune works on graphs of one file." if graph.data else "See `repaconv export --onnx`.",
                code="tune.graph",
            )
        fitting = sorted(known, key=lambda rewrite: (rewrite.order, rewrite.name))
        progress("what applies", 0, 0)
        rewrites = {rewrite.name: rewrite for rewrite in fitting if rewritten(graph.model, [rewrite])[1]}
        default = tuple(name for name in rewrites if name in device.form(folded.called))
        return cls(graph.model, rewrites, default, judging_call(subject), scratch)

    def model(self, form: Form) -> onnx.ModelProto:
        """The graph in a form."""
        from repaconv.graphs.graph import rewritten

        return rewritten(self.raw, [self.rewrites[name] for name in form])[0]

    def macs(self, form: Form) -> int:
        """What it multiplies and adds for one image."""
        import onnx

        from repaconv.graphs.costs import macs_of

        if form not in self.counted:
            self.counted[form] = macs_of(onnx.load(self.path(form)))
        return self.counted[form]

    def fitting(self, form: Form, newest: int) -> Form:
        """As much of a form as that opset can say, and as changes this graph: the form may be another checkpoint's."""
        return tuple(name for name in form if name in self.rewrites and self.rewrites[name].opset <= newest)

    def path(self, form: Form) -> Path:
        """The same as a file; equal graphs are one file."""
        if form not in self.made:
            content = self.model(form).SerializeToString(deterministic=True)
            self.made[form] = self.folder / f"{sha256_of_bytes(content)}.onnx"
            if not self.made[form].is_file():
                write_bytes(self.made[form], content)
        return self.made[form]


def judging_call(subject: Subject) -> Batch:
    """Three images, as many as a call takes where that is fixed, or a call where it takes no images."""
    count = subject.folded.batch if isinstance(subject.folded.batch, int) else 1 if subject.folded.whole else 3
    return subject.drawn(count, 0).piece(0, count)
