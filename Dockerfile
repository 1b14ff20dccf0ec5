# qfleet in a container.
#
#   docker build -t qfleet .
#   docker run --rm -v qfleet-runs:/home/qfleet/runs qfleet train cartpole
#
# For NVIDIA GPUs: docker build --build-arg TORCH_INDEX=https://pypi.org/simple -t qfleet .
# With other extras of pyproject.toml: docker build --build-arg EXTRAS=atari,ray -t qfleet .
FROM python:3.11-slim

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=atari

ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

RUN useradd --create-home --uid 1000 qfleet

# PyTorch is large and changes rarely: it has a layer of its own.
COPY constraints.txt /src/
RUN pip install --index-url "$TORCH_INDEX" "$(grep '^torch==' /src/constraints.txt)"

COPY pyproject.toml README.md LICENSE /src/
COPY qfleet /src/qfleet
RUN pip install --constraint /src/constraints.txt "/src[$EXTRAS]" \
    && rm -r /src

USER qfleet
WORKDIR /home/qfleet
RUN mkdir runs

ENTRYPOINT ["qfleet"]
CMD ["--help"]
