# repaconv on a Jetson Orin with JetPack 6 (L4T 36.4, TensorRT 10.3). Older boards need no image: see `repaconv bundle`.
#   docker build -f docker/jetson.Dockerfile -t repaconv:jetson .
#   docker run --rm --runtime nvidia repaconv:jetson demo --arch s12 -o /tmp/demo
#   docker run --rm --runtime nvidia repaconv:jetson doctor --target orin-nano
FROM nvcr.io/nvidia/l4t-jetpack:r36.4.0
ARG PIP_ARGS=""
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
RUN python3 -m venv --system-site-packages /opt/repaconv \
    && /opt/repaconv/bin/pip install --no-cache-dir -c constraints.txt ${PIP_ARGS} ".[polygraphy]" \
    && useradd --create-home --uid 10001 --groups video repaconv
ENV PATH=/opt/repaconv/bin:$PATH
USER 10001
WORKDIR /home/repaconv
ENTRYPOINT ["repaconv"]
CMD ["--help"]
