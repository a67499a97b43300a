# The target `services` has all of muster. `node` has only what runs on every node: the plugin, the watcher and the
# FUSE broker. `laptop` adds nats-server and the stand-ins.
#   docker build --target services -t muster .
#   docker build --target node -t muster-node .
# Every package is verified by its hash. To build without a network, put the wheels into build/wheels, and
#   --build-arg PIP_OPTIONS="--no-index --find-links /wheels"
ARG PYTHON_IMAGE=python:3.11-slim
# a Debian with musl-tools and make needs no network for the helper
ARG HELPER_IMAGE=${PYTHON_IMAGE}

FROM ${PYTHON_IMAGE} AS venv
RUN python3 -m venv /opt/venv
COPY requirements build/wheel[s] /wheels/

FROM venv AS build-node
ARG PIP_OPTIONS=""
RUN /opt/venv/bin/pip install --no-cache-dir --disable-pip-version-check --require-hashes --no-deps \
    --only-binary :all: ${PIP_OPTIONS} -r /wheels/node.lock \
    && /opt/venv/bin/pip uninstall --yes --quiet setuptools pip

FROM venv AS build
ARG PIP_OPTIONS=""
RUN /opt/venv/bin/pip install --no-cache-dir --disable-pip-version-check --require-hashes --no-deps \
    --only-binary :all: ${PIP_OPTIONS} -r /wheels/services.lock

FROM build AS build-services
# an intruder shall find no installer in a container
RUN /opt/venv/bin/pip uninstall --yes --quiet setuptools pip

FROM build AS build-laptop
ARG PIP_OPTIONS=""
RUN /opt/venv/bin/pip install --no-cache-dir --disable-pip-version-check --require-hashes --no-deps \
    --only-binary :all: ${PIP_OPTIONS} -r /wheels/laptop.lock \
    && /opt/venv/bin/pip uninstall --yes --quiet setuptools pip

# uncompiled imports double the start time, and with a read-only root they would never be compiled
FROM ${PYTHON_IMAGE} AS code-node
COPY muster /opt/muster/muster
COPY services/plugin/muster_plugin /opt/muster/muster_plugin
COPY services/fuse/muster_fuse /opt/muster/muster_fuse
RUN python3 -m compileall -q --invalidation-mode unchecked-hash /opt/muster

FROM code-node AS code
COPY services/labeler/muster_labeler /opt/muster/muster_labeler
COPY services/health/muster_health /opt/muster/muster_health
COPY services/notifier/muster_notifier /opt/muster/muster_notifier
COPY services/gate/muster_gate /opt/muster/muster_gate
COPY services/console/muster_console /opt/muster/muster_console
# `muster` finds the services' commands by entry points, which exist only for installed packages
COPY pyproject.toml scripts/entry_points.py /tmp/
RUN python3 /tmp/entry_points.py /tmp/pyproject.toml /opt/muster
RUN python3 -m compileall -q --invalidation-mode unchecked-hash /opt/muster

FROM ${PYTHON_IMAGE} AS base
ENV PATH=/opt/venv/bin:$PATH PYTHONPATH=/opt/muster PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
# named volumes inherit the owner of these directories
RUN install -d -o 65532 -g 65532 /var/lib/kubelet /data /faults
USER 65532:65532
ENTRYPOINT ["/opt/venv/bin/python", "-m"]

FROM base AS laptop
COPY --from=build-laptop /opt/venv /opt/venv
COPY --from=code /opt/muster /opt/muster

FROM ${HELPER_IMAGE} AS helper
RUN command -v musl-gcc >/dev/null \
    || (apt-get update && apt-get install --yes --no-install-recommends gcc make musl-tools)
COPY services/fuse/helper /helper
RUN make -C /helper static OUT=/helper/made

FROM base AS node
COPY --from=build-node /opt/venv /opt/venv
COPY --from=code-node /opt/muster /opt/muster
# the FUSE broker puts it into pods
COPY --from=helper /helper/made/fusermount3-static /opt/muster/fusermount3
CMD ["muster_plugin"]

FROM base AS services
COPY --from=build-services /opt/venv /opt/venv
COPY --from=code /opt/muster /opt/muster
COPY --from=helper /helper/made/fusermount3-static /opt/muster/fusermount3
CMD ["muster_health"]
