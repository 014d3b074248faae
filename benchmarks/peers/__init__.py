"""How much faster repaconv is than the fastest that somebody else's tools make of the same network, by machine.

    make bench-deploy [ROWS="repavit-digits riformer-s12"] [BUDGET=300] [SECONDS=3600] [THREADS=2] [BATCH=8]

Every row is one network at one batch and number of threads, and one interleaved run of everybody: the graph made by
hand (`benchmarks/handmade`) on ONNX Runtime, on OpenVINO and under `torch.compile`; in lower precision OpenVINO's
bfloat16, ONNX Runtime's own quantizer and NNCF, each with its defaults; and ours, in its default form and as `tune`
leaves it, exact and within 0.5% of other first classes. Networks are the five that come along, trained, where images
that nothing saw judge what each loses; and published sizes with seeded weights, where a way of ours counts only if it
lost no more than that on the trained net of its method. Seeded weights tell nothing of quality, only of speed.

Arbitrary networks are measured as well (`make bench-originals`): every competing tool gets the original graph, ours
is what `tune` leaves; `original_networks.py` says which, `original_row.py` measures a row.

`nets.py` says which networks, `by_hand.py` and `by_nncf.py` make the peers, `ours.py` what repaconv makes, `row.py`
measures a row, `page.py` writes `docs/competing-toolchains.md`.
"""
