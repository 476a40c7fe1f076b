# The server as an image: `make image`, or
#
#     docker build --tag longdraft .
#     docker run --rm --publish 8000:8000 --env LONGDRAFT_API_KEY=secret --volume longdraft:/data longdraft
#
# Other commands: `docker run --rm longdraft generate "It was" --max-new-tokens 200`.
# PIP_EXTRA_INDEX_URL chooses another build of PyTorch, such as the smaller one for CPUs only.

ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
# Any C++ compiler of the distribution will do.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim
ARG PIP_EXTRA_INDEX_URL=""
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    --mount=type=bind,source=constraints.txt,target=/constraints.txt \
    --mount=type=bind,source=packaging,target=/packaging \
    pip install --no-cache-dir --constraint /constraints.txt "$(echo /wheels/longdraft-*.whl)[serve,structured]" \
    && python /packaging/check_wheel.py --installed /wheels/longdraft-*.whl \
    && useradd --create-home --uid 10001 longdraft \
    && install --directory --owner longdraft /data
USER 10001
# Journals, models from the hub and quantised copies outlive the container in one volume.
ENV HF_HOME=/data/hub XDG_CACHE_HOME=/data/cache XDG_STATE_HOME=/data/state \
    LONGDRAFT_HOST=0.0.0.0 LONGDRAFT_LOG_FORMAT=json
VOLUME /data
WORKDIR /data
EXPOSE 8000
HEALTHCHECK --start-period=60s --interval=10s --timeout=3s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["longdraft"]
CMD ["serve"]
