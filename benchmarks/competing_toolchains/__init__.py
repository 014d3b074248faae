"""Speedup of repaconv over the fastest competing toolchain on the same network, by CPU.

    make bench-competitors [ROWS="repavit-digits riformer-s12"] [BUDGET=300] [SECONDS=3600] [THREADS=2] [BATCH=8]

Every row is one network at one batch size and thread count, in one interleaved run: the manual baseline
(`benchmarks/manual_baselines`) on ONNX Runtime, on OpenVINO and under `torch.compile`; in lower precision BF16 of
OpenVINO, ONNX Runtime's quantizers and NNCF, each with its defaults; and repaconv, in its default preset and as `tune`
leaves it, exact and with at most 0.5% of changed top-1 predictions. Networks are the five trained ones that are
installed with repaconv, evaluated on images that no step has used, and published sizes with seeded weights. Seeded
weights say nothing about accuracy: there a lossy configuration counts only if it lost no more on the trained network of
its method.

Arbitrary networks are measured as well (`make bench-competitors-arbitrary`): every competing tool gets the original
graph, and repaconv is what `tune` leaves. `arbitrary_networks.py` lists the networks, and `arbitrary_network_row.py`
measures a row.

`method_networks.py` lists the networks, `competitors.py` and `nncf_process.py` make the competing models,
`repaconv_configurations.py` those of repaconv, `method_row.py` measures a row, and `docs_page.py` writes
`docs/competing-toolchains.md`.
"""
