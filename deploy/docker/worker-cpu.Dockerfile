# The image of encoder and PD workers on CPUs. Built by `make images`; the context is the repository's root.
# Where packages come from is the builder's business: ARGs below, or `make images IMAGE_BUILD_ARGS=...`.
ARG BASE=docker.io/library/python:3.11-slim

FROM ${BASE} AS build
ARG PIP_INDEX_URL
# Words for the torch install, like "--index-url <index of CPU wheels>": the default index may have CUDA builds.
ARG PIP_TORCH_ARGS
WORKDIR /build
# pip stays here: the venv that goes into the image has none. Bytecode is made to be valid whatever times its sources
# get, which layers round: in a read-only image it could not be made again.
RUN python3 -m venv pip && python3 -m venv --without-pip /opt/triptych
COPY pyproject.toml constraints.txt deploy/docker/requirements.py ./
RUN pip/bin/pip --python /opt/triptych/bin/python install --no-cache-dir --no-compile -c constraints.txt ${PIP_TORCH_ARGS} torch \
  && /opt/triptych/bin/python -c 'import sys, torch; torch.version.cuda and sys.exit( \
    f"torch {torch.__version__} is a CUDA build: give the index of CPU wheels, PIP_TORCH_ARGS=\"--index-url <index>\"")'
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
LABEL org.opencontainers.image.title="triptych-worker-cpu" \
      org.opencontainers.image.description="Triptych's encoder and PD workers, on CPUs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=build /etc/passwd /etc/group /etc/
COPY --from=build /opt/triptych /opt/triptych
# The root file system may be read-only: what is written goes to /tmp.
ENV PATH=/opt/triptych/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/tmp \
    LANG=C.UTF-8 \
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
