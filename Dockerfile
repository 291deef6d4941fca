# The learner and the collectors of docs/cluster.md. In a clone: docker build --tag REGISTRY/IMAGE .
FROM python:3.12 AS build
COPY . /source
RUN pip wheel --no-deps --wheel-dir /wheels /source

FROM python:3.12-slim
# libegl1 renders frames of MuJoCo, and KubeRay's probes call wget.
RUN apt-get update && apt-get install --yes --no-install-recommends libegl1 wget && rm -rf /var/lib/apt/lists/*
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(ls /wheels/*.whl)[mujoco,ppo,ray]" "ray[default]"
WORKDIR /work
CMD ["ppo", "train", "--help"]
