# repaconv beside TensorRT 10.3, CUDA 12.6, on a server with an NVIDIA GPU: the version of the targets a100, h100 and t4.
#   docker build -f docker/tensorrt.Dockerfile -t repaconv:tensorrt .
#   docker run --rm --gpus all repaconv:tensorrt demo --arch s12 -o /tmp/demo
#   docker run --rm --gpus all repaconv:tensorrt doctor --target a100
FROM nvcr.io/nvidia/tensorrt:24.08-py3
ARG PIP_ARGS=""
WORKDIR /source
COPY . .
# The base brings TensorRT's Python package: the environment sees it, and has the rest of its own.
RUN python3 -m venv --system-site-packages /opt/repaconv \
    && /opt/repaconv/bin/pip install --no-cache-dir -c constraints.txt ${PIP_ARGS} ".[polygraphy]" \
    && useradd --create-home --uid 10001 repaconv
ENV PATH=/opt/repaconv/bin:$PATH
USER 10001
WORKDIR /home/repaconv
ENTRYPOINT ["repaconv"]
CMD ["--help"]
