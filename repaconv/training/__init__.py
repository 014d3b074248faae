"""Training where images alone are not enough: a short course from an untrained form, or a conversion, to what folds.

Data flows: an ordinary network (`originals.py`) becomes the training form of a method with its weights taken over, a
file a method: `branches.py` (nondeep), `idling.py` (repavit), `affines.py` (riformer), `gating.py` (dwconv, eq. 18).
Each of them, and `dropins.py` for what was converted already, also says how such a net is trained, as a `Course`
(`course.py`); `forms.py` is the list of them. `loop.py` runs any course: it learns from the network before conversion
(`lessons.py`), on images that fit; those that choose say which epoch is kept; `keeping.py` has what it needs to go on
with the same bits.
"""
