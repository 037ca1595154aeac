# The engine, for CPUs or CUDA:
#   docker build --file deploy/docker/engine.Dockerfile --build-arg VARIANT=cpu --tag backhaul-engine:0.1.0-cpu .
#   docker build --file deploy/docker/engine.Dockerfile --build-arg VARIANT=cuda --tag backhaul-engine:0.1.0-cuda .
ARG PYTHON=3.12-slim-bookworm
ARG VARIANT=cpu

FROM python:${PYTHON} AS build
ARG VARIANT
# The version that pyproject.toml pins. Its builds, and what they need of CUDA, come from an index of their own.
ARG TORCH=2.13.0
ARG TORCH_INDEX_CPU=https://download.pytorch.org/whl/cpu
ARG TORCH_INDEX_CUDA=https://pypi.org/simple
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY deploy/docker/requirements-build.txt deploy/docker/requirements-engine.txt deploy/docker/requirements-cuda.txt ./
RUN python -m venv /opt/backhaul \
 && pip install --require-hashes --no-deps --only-binary :all: --requirement requirements-build.txt \
 && /opt/backhaul/bin/pip install --require-hashes --no-deps --only-binary :all: --requirement requirements-engine.txt
# NIXL's CUDA part is of CUDA 12, whatever torch has.
RUN case "${VARIANT}" in \
      cpu) /opt/backhaul/bin/pip install --index-url "${TORCH_INDEX_CPU}" "torch==${TORCH}" ;; \
      cuda) /opt/backhaul/bin/pip install --index-url "${TORCH_INDEX_CUDA}" "torch==${TORCH}" \
         && /opt/backhaul/bin/pip install --require-hashes --no-deps --requirement requirements-cuda.txt ;; \
      *) echo "VARIANT is cpu or cuda, not ${VARIANT}"; exit 1 ;; \
    esac
COPY pyproject.toml README.md LICENSE ./
COPY backhaul backhaul
COPY connectors connectors
COPY engine engine
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
 && /opt/backhaul/bin/pip install --no-deps /wheels/*.whl \
 && /opt/backhaul/bin/pip uninstall --yes pip

FROM python:${PYTHON}
# CPU kernels are compiled for the machine they run on, once, into the cache. Triton needs the compiler as well.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/* \
 && install --directory --owner 10001 --group 10001 /cache
COPY --from=build /opt/backhaul /opt/backhaul
ENV PATH=/opt/backhaul/bin:${PATH} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    HOME=/cache XDG_CACHE_HOME=/cache USER=backhaul \
    LD_LIBRARY_PATH=/opt/backhaul/lib/python3.12/site-packages/nvidia/cuda_runtime/lib
USER 10001:10001
EXPOSE 8000
ENTRYPOINT ["backhaul"]
CMD ["engine"]
