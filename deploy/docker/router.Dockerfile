# The router, small: docker build --file deploy/docker/router.Dockerfile --tag backhaul-router:0.1.0 .
ARG PYTHON=3.12-slim-bookworm

FROM python:${PYTHON} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY deploy/docker/requirements-build.txt deploy/docker/requirements-router.txt ./
RUN python -m venv /opt/backhaul \
 && pip install --require-hashes --no-deps --only-binary :all: --requirement requirements-build.txt \
 && /opt/backhaul/bin/pip install --require-hashes --no-deps --only-binary :all: --requirement requirements-router.txt
COPY pyproject.toml README.md LICENSE ./
COPY backhaul backhaul
COPY router router
COPY connectors connectors
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
 && /opt/backhaul/bin/pip install --no-deps /wheels/*.whl \
 && /opt/backhaul/bin/pip uninstall --yes pip

FROM python:${PYTHON}
COPY --from=build /opt/backhaul /opt/backhaul
# Nothing is written: the root filesystem can be read-only.
ENV PATH=/opt/backhaul/bin:${PATH} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
EXPOSE 8000
ENTRYPOINT ["backhaul"]
CMD ["router"]
