# repaconv for 64-bit ARM boards: ONNX Runtime.
#   docker build --platform linux/arm64 -f docker/arm64.Dockerfile -t repaconv:arm64 .
#   docker run --rm repaconv:arm64 demo --arch s12 -o /tmp/demo
FROM python:3.11.9-slim-bookworm AS builder
# Options for pip: where it finds a CPU build of torch. Without them it takes the one with CUDA, some GB larger.
ARG PIP_ARGS=""
WORKDIR /source
COPY . .
RUN python3 -m venv /opt/repaconv \
    && /opt/repaconv/bin/pip install --no-cache-dir -c constraints.txt ${PIP_ARGS} .

FROM python:3.11.9-slim-bookworm
COPY --from=builder /opt/repaconv /opt/repaconv
RUN useradd --create-home --uid 10001 repaconv
ENV PATH=/opt/repaconv/bin:$PATH
USER 10001
WORKDIR /home/repaconv
ENTRYPOINT ["repaconv"]
CMD ["--help"]
