# repaconv for x86-64 processors: ONNX Runtime, and OpenVINO for bf16.
#   docker build -f docker/x86-64.Dockerfile -t repaconv:x86-64 .
#   docker run --rm repaconv:x86-64 demo --arch s12 -o /tmp/demo
FROM python:3.11.9-slim-bookworm AS builder
# Options for pip: where it finds a CPU build of torch. Without them it takes the one with CUDA, some GB larger.
ARG PIP_ARGS=""
WORKDIR /source
COPY . .
RUN python3 -m venv /opt/repaconv \
    && /opt/repaconv/bin/pip install --no-cache-dir -c constraints.txt ${PIP_ARGS} ".[openvino]"

FROM python:3.11.9-slim-bookworm
COPY --from=builder /opt/repaconv /opt/repaconv
RUN useradd --create-home --uid 10001 repaconv
ENV PATH=/opt/repaconv/bin:$PATH
USER 10001
WORKDIR /home/repaconv
ENTRYPOINT ["repaconv"]
CMD ["--help"]
