# An image that runs `shoal` as a coordinator or an agent: docker build -t shoal .
# This file has not been built by the project's tests, which have no Docker engine.
FROM python:3.11-slim

# The wheel of torch on PyPI needs several GB of CUDA libraries. This index has builds for the CPU only. For GPUs:
# --build-arg TORCH_INDEX=https://pypi.org/simple
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

# tini passes signals on, and collects processes whose parent has ended.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/shoal
COPY constraints.txt ./
# The version is that of constraints.txt, but from another index, so PyPI's torch is not installed below.
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" "$(grep '^torch==' constraints.txt)"
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir --constraint constraints.txt .

# The user of the Kubernetes manifests. Docker Compose sets another one, the owner of the keys: so every user can write
# to /runs, and caches are in /tmp.
RUN useradd --uid 10001 --no-create-home shoal \
    && install --directory --mode 1777 /runs
ENV HOME=/tmp USER=shoal
USER 10001:10001
WORKDIR /runs

ENTRYPOINT ["tini", "--", "shoal"]
CMD ["--help"]
