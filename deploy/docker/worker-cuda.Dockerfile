# The image of encoder and PD workers on CUDA devices. Built by `make images`; the context is the repository's root.
# Where packages come from is the builder's business: ARGs below, or `make images IMAGE_BUILD_ARGS=...`.
ARG BASE=docker.io/library/python:3.11-slim

FROM ${BASE} AS build
ARG PIP_INDEX_URL
# Words for the torch install, like "--index-url <index of wheels for your CUDA>".
ARG PIP_TORCH_ARGS
WORKDIR /build
# pip stays here: the venv that goes into the image has none. Bytecode is made to be valid whatever times its sources
# get, which layers round: in a read-only image it could not be made again.
RUN python3 -m venv pip && python3 -m venv --without-pip /opt/triptych
COPY pyproject.toml constraints.txt deploy/docker/requirements.py ./
RUN pip/bin/pip --python /opt/triptych/bin/python install --no-cache-dir --no-compile -c constraints.txt ${PIP_TORCH_ARGS} torch \
  && /opt/triptych/bin/python -c 'import sys, torch; torch.version.cuda or sys.exit( \
    f"torch {torch.__version__} has no CUDA: give the index of CUDA wheels, PIP_TORCH_ARGS=\"--index-url <index>\"")'
RUN python3 requirements.py worker otel doctor > requirements.txt \
  && pip/bin/pip --python /opt/triptych/bin/python install --no-cache-dir --no-compile -c constraints.txt -r requirements.txt \
  && /opt/triptych/bin/python -m compileall -q -f -j 0 --invalidation-mode unchecked-hash -x py312_intrinsics /opt/triptych/lib
# The C++ compiler stays here, too: what goes into the image is the kernels' library.
RUN command -v g++ \
  || { apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*; }
COPY . .
RUN pip/bin/pip --python /opt/triptych/bin/python install --no-cache-dir --no-compile --no-deps . \
  && ls /opt/triptych/lib/python3*/site-packages/triptych/kernels/*.so \
  && /opt/triptych/bin/python -m compileall -q -f -j 0 --invalidation-mode unchecked-hash /opt/triptych/lib/python3*/site-packages/triptych \
  && cp deploy/docker/healthcheck.py /opt/triptych/ \
  && echo 'triptych:x:65532:65532:triptych:/tmp:/usr/sbin/nologin' >> /etc/passwd \
  && echo 'triptych:x:65532:' >> /etc/group

FROM ${BASE}
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="triptych-worker-cuda" \
      org.opencontainers.image.description="Triptych's encoder and PD workers, on CUDA devices" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# Triton compiles the attention kernel's launcher with a C compiler and Python's headers when a worker starts.
RUN apt-get update \
  && apt-get install -y --no-install-recommends gcc libc6-dev \
  && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt /var/log/dpkg.log \
  && python3 -c 'import pathlib, sys, sysconfig; \
    (pathlib.Path(sysconfig.get_path("include")) / "Python.h").exists() or sys.exit("BASE has no Python.h: add python3-dev")'
COPY --from=build /etc/passwd /etc/group /etc/
COPY --from=build /opt/triptych /opt/triptych
# The root file system may be read-only: what is written, compiled kernels too, goes to /tmp.
# NVIDIA_*: what NVIDIA's container runtime puts into the container.
ENV PATH=/opt/triptych/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/tmp \
    LANG=C.UTF-8 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    NVIDIA_VISIBLE_DEVICES=all \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    TRIPTYCH_METRICS_PORT=9100
USER 65532:65532
WORKDIR /tmp
EXPOSE 50051 9100
STOPSIGNAL SIGTERM
# A worker may load its model for minutes before its metrics port answers.
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s --retries=3 \
  CMD ["/opt/triptych/bin/python", "-I", "/opt/triptych/healthcheck.py"]
ENTRYPOINT ["triptych"]
CMD ["--help"]
