"""Pods as a kubelet starts them, in containers of podman, and the controller of an Indexed Job."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from importlib.metadata import version
from pathlib import Path

import filelock
import pytest
import yaml
from launch import PATIENCE, need
from recipes import ROOT, STEP, changed_copy

# crun does not run where cgroups are in hybrid mode.
PODMAN = ["podman", "--runtime", "runc"]
# By default podman asks for more than a container of CI may have.
LIMITS = ["--ulimit=nofile=4096:4096", "--ulimit=nproc=4096:4096"]
# A base of Debian alone, with this machine's configuration of pip and its certificates. The options
# are those of Debian's own images; without the first, dpkg waits for the disk at each package.
BASE = """\
options=(--dpkgopt=force-unsafe-io --aptopt='Acquire::Languages "none"'
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*')
if [ -e /etc/pip.conf ]; then
    options+=(--customize-hook="upload /etc/ssl/certs/ca-certificates.crt /etc/site.crt"
        --customize-hook="upload /etc/pip.conf /etc/pip.conf"
        --customize-hook='sed -i "s|^cert *=.*|cert = /etc/site.crt|" "$1/etc/pip.conf"')
fi
mmdebstrap --quiet --variant=minbase "${options[@]}" bookworm | podman import --quiet - \
"""


def need_podman():
    need(
        os.geteuid() == 0 and all(map(shutil.which, ("podman", "runc", "mmdebstrap"))),
        "root, and apt-get install podman runc netavark aardvark-dns iptables mmdebstrap",
    )


def podman(*arguments, status=0):
    """What podman prints, and where it fails also its messages."""
    # Not in the repository: conmon writes a file named oom where it was started.
    done = subprocess.run(
        [*PODMAN, *arguments],
        cwd=tempfile.gettempdir(),
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == status, f"{arguments}:\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr if status else done.stdout


def build(target):
    """The name of the image of a target of the Containerfile."""
    base = "localhost/recipes-test-base"
    image = f"localhost/recipes-test-{target}"
    # Horovod is built once, by make test: it takes minutes, and many more beside other tests. The
    # wheel fits one torch, and the image gets that one.
    folder = Path(sys.prefix, "wheels")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "torch.txt").write_text(f"torch=={version('torch').partition('+')[0]}\n")
    wheels = [
        f"--volume={folder}:/wheels:ro",
        "--build-arg=HOROVOD_WHEELS=/wheels",
        "--env=PIP_CONSTRAINT=/wheels/torch.txt",
    ]
    with filelock.FileLock("/var/lock/recipes-test-image.lock"):
        if not podman("images", "--quiet", base):
            subprocess.run(["bash", "-eo", "pipefail", "-c", BASE + base], check=True)
        podman(
            "build",
            "--isolation=chroot",
            "--network=host",
            *LIMITS,
            f"--build-arg=BASE={base}",
            f"--target={target}",
            f"--tag={image}",
            *wheels,
            str(ROOT),
        )
    return image


# Where a pod finds sitecustomize.py, with which Python starts faster in all tests.
START = {"/tests": ROOT / "tests" / "helpers" / "start"}

# In each manifest, what has to be said for small machines without a GPU: {old: new}
SMALL = {
    'value: "8"': 'value: "1"',
    'cpu: "32"': 'cpu: "1"',
    "memory: 64Gi": "memory: 2Gi",
    "nvidia.com/gpu: 4": 'cpu: "1"',
    "sizeLimit: 16Gi": "sizeLimit: 64Mi",
}


def documents(manifest, changes):
    """The documents of a manifest, after SMALL and `changes`, whose old texts are in it."""
    text = (ROOT / manifest).read_text()
    for old, new in (SMALL | changes).items():
        assert old in text, f"{manifest} has no '{old}'"
        text = text.replace(old, new)
    return list(yaml.safe_load_all(text))


# Before a step is counted, all ranks wait at a gate: a fault comes at a step that is known, however
# slow podman is. A rank that was told to stop opens the gate for the others.
GATE = """\
            gate = Path(args.log_dir, f"gate-{run.position.steps}")
            if run.position.steps in GATES and not gate.exists():
                import time
                # A line in one piece: other ranks print, too.
                sys.stdout.write(f"at {gate.name}\\n")
                sys.stdout.flush()
                while not (run.stop.requested or gate.exists()):
                    time.sleep(0.05)
                gate.touch()
"""


def with_gates(recipe, steps, folder):
    """A copy of a recipe, and of what it imports, in `folder`, which waits at each of `steps`."""
    gate = GATE.replace("GATES", str(steps))
    return changed_copy(folder, recipe, STEP, STEP + gate) / Path(recipe).name


def bytes_of(quantity):
    """The number of bytes of a quantity of Kubernetes."""
    number, unit = re.fullmatch(r"(\d+)(|[KMGT]i)", quantity).groups()
    return int(number) * 1024 ** ["", "Ki", "Mi", "Gi", "Ti"].index(unit)


class Namespace:
    """A network with the names of pods, and the volumes of claims."""

    def __init__(self, folder):
        self.folder = folder
        self.name = f"recipes-{uuid.uuid4().hex[:12]}"
        podman("network", "create", "--internal", self.name)
        network = json.loads(podman("network", "inspect", self.name))
        # The first address is the network's own.
        self.addresses = iter(
            network[0]["subnets"][0]["subnet"].replace("0/24", str(last)) for last in range(2, 255)
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        label = f"label={self.name}"
        if containers := podman("ps", "--all", "--quiet", f"--filter={label}").split():
            podman("rm", "--force", "--time=0", *containers)
        podman("network", "rm", self.name)

    def claim(self, name, group):
        """The folder of a PersistentVolumeClaim, as a volume with fsGroup is mounted."""
        folder = self.folder / "claims" / name
        folder.mkdir(parents=True, exist_ok=True)
        os.chown(folder, -1, group)
        folder.chmod(0o2775)
        return folder


class Pod:
    """A container of the pod template of a manifest, with what a kubelet gives it.

    `names` are further names of it in the network, and `mounts` what an operator or a test mounts:
    {path: folder or file}.
    """

    def __init__(self, namespace, template, image, hostname, names=(), mounts=None, **environment):
        spec = template["spec"]
        (container,) = spec["containers"]
        self.namespace = namespace
        self.grace = spec.get("terminationGracePeriodSeconds", 30)
        self.disrupted = False
        self.name = f"{namespace.name}-{hostname}-{uuid.uuid4().hex[:6]}"
        self.file = namespace.folder / f"{self.name}.log"
        address = next(namespace.addresses)
        self.environment = (
            {"PYTHONPATH": "/tests"}
            | environment
            | {
                entry["name"]: entry["value"] if "value" in entry else self.field(entry, address)
                for entry in container.get("env", [])
            }
        )
        # $(NAME) is the value of a variable of the container.
        arguments = [
            re.sub(r"\$\((\w+)\)", lambda found: self.environment[found[1]], argument)
            for argument in container.get("args", [])
        ]
        names = [hostname, *names]
        if "subdomain" in spec:
            names.append(f"{hostname}.{spec['subdomain']}")
        # As in Kubernetes, a command replaces the image's entry point.
        command = container.get("command", [])
        run = [
            "run",
            *([f"--entrypoint={json.dumps(command)}"] if command else []),
            f"--name={self.name}",
            f"--label={namespace.name}",
            f"--network={namespace.name}",
            f"--ip={address}",
            f"--hostname={hostname}",
            *(f"--network-alias={name}" for name in names),
            *(f"--env={name}={value}" for name, value in self.environment.items()),
            *LIMITS,
            *self.security(spec, container),
            *self.resources(container),
            *self.mounts(spec, container),
            *(f"--volume={folder}:{path}:ro" for path, folder in (START | (mounts or {})).items()),
            image,
            *arguments,
        ]
        # Attached: what it prints, a signal to it, and its end need no further command of podman,
        # which takes seconds on a busy machine, while the pods train on.
        with self.file.open("w") as file:
            self.process = subprocess.Popen(
                [*PODMAN, *run],
                cwd=tempfile.gettempdir(),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    @staticmethod
    def field(entry, address):
        assert entry["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
        return address

    @staticmethod
    def security(spec, container):
        of_pod = spec.get("securityContext", {})
        of_container = container.get("securityContext", {})
        found = []
        if "runAsUser" in of_pod:
            found.append(f"--user={of_pod['runAsUser']}:{of_pod['runAsGroup']}")
            found.append(f"--group-add={of_pod['fsGroup']}")
        if of_container.get("readOnlyRootFilesystem"):
            found += ["--read-only", "--read-only-tmpfs=false"]
        if of_container.get("allowPrivilegeEscalation") is False:
            found.append("--security-opt=no-new-privileges")
        dropped = of_container.get("capabilities", {}).get("drop", [])
        return found + [f"--cap-drop={name}" for name in dropped]

    @staticmethod
    def resources(container):
        limits = container["resources"].get("limits", {})
        found = []
        if "memory" in limits:
            size = bytes_of(limits["memory"])
            # No swap.
            found += [f"--memory={size}", f"--memory-swap={size}"]
        if "cpu" in limits:
            found.append(f"--cpus={limits['cpu']}")
        return found

    def mounts(self, spec, container):
        volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
        group = spec.get("securityContext", {}).get("fsGroup", 0)
        found = []
        for mount in container.get("volumeMounts", []):
            volume = volumes[mount["name"]]
            path = mount["mountPath"]
            if "persistentVolumeClaim" in volume:
                folder = self.namespace.claim(volume["persistentVolumeClaim"]["claimName"], group)
                found.append(f"--volume={folder}:{path}")
            elif volume["emptyDir"].get("medium") == "Memory":
                size = bytes_of(volume["emptyDir"]["sizeLimit"])
                found.append(f"--mount=type=tmpfs,destination={path},tmpfs-size={size},chown=false")
            else:
                folder = self.namespace.folder / f"{self.name}-{mount['name']}"
                folder.mkdir()
                folder.chmod(0o777)
                found.append(f"--volume={folder}:{path}")
        return found

    def status(self):
        """Its exit status, or None while it runs."""
        return self.process.poll()

    def wait(self):
        """Its exit status, once it has ended."""
        return self.process.wait(PATIENCE)

    def log(self):
        return self.file.read_text()

    def wait_for(self, text):
        """Return once its log has the regular expression `text`; it has to run until then."""
        end = time.monotonic() + PATIENCE
        while not re.search(text, self.log(), re.MULTILINE):
            assert self.status() is None, self.log()
            assert time.monotonic() < end, f"no {text} in {PATIENCE} s:\n{self.log()}"
            time.sleep(0.2)

    def execute(self, *command, status=0):
        """What a command in the running pod prints: kubectl exec."""
        return podman("exec", self.name, *command, status=status)


def kill(*pods):
    """SIGKILL to all processes of all of them, at once."""
    podman("kill", "--signal=KILL", *(pod.name for pod in pods))


def evict(*pods):
    """End pods at the same time as evictions do: SIGTERM, and SIGKILL after the grace period."""
    for pod in pods:
        pod.disrupted = True
        pod.process.terminate()
    for pod in pods:
        try:
            pod.process.wait(pod.grace)
        except subprocess.TimeoutExpired:
            kill(pod)
            pod.wait()


class IndexedJob:
    """The pods of an Indexed Job, which it replaces as the controller does, but without a delay."""

    def __init__(self, namespace, job, image, mounts):
        self.namespace = namespace
        self.mounts = mounts
        self.spec = job["spec"]
        self.name = job["metadata"]["name"]
        self.image = image
        assert self.spec["completionMode"] == "Indexed"
        assert self.spec["template"]["spec"]["restartPolicy"] == "Never"
        self.failures = 0
        self.succeeded = set()
        self.ended = []
        self.pods = {index: self.start(index) for index in range(self.spec["completions"])}

    def start(self, index):
        return Pod(
            self.namespace,
            self.spec["template"],
            self.image,
            f"{self.name}-{index}",
            mounts=self.mounts,
            JOB_COMPLETION_INDEX=str(index),
        )

    def ignores_disruptions(self):
        rules = self.spec.get("podFailurePolicy", {}).get("rules", [])
        return {"type": "DisruptionTarget"} in [
            condition
            for rule in rules
            if rule["action"] == "Ignore"
            for condition in rule.get("onPodConditions", [])
        ]

    def replace_pods(self):
        """Replace the pods that have failed, and fail after more than backoffLimit of them."""
        for index, pod in self.pods.items():
            status = None if index in self.succeeded else pod.status()
            if status is None:
                continue
            if status == 0:
                self.succeeded.add(index)
                continue
            if not (pod.disrupted and self.ignores_disruptions()):
                self.failures += 1
            assert self.failures <= self.spec["backoffLimit"], f"the job has failed:\n{self.log()}"
            self.ended.append(pod)
            self.pods[index] = self.start(index)

    def evict(self, *indexes):
        """Evict pods at the same time, and return once all of them have ended."""
        evict(*(self.pods[index] for index in indexes))

    def log(self):
        """What all its pods have printed, one pod after the other."""
        return "".join(pod.log() for pod in [*self.ended, *self.pods.values()])

    def wait_for(self, text, count=1):
        """Return once the log has the regular expression `text`, `count` times."""
        self.wait(lambda: len(re.findall(text, self.log(), re.MULTILINE)) >= count, text)

    def finish(self):
        """Return the log once all indexes have succeeded."""
        self.wait(lambda: len(self.succeeded) == len(self.pods), "end")
        return self.log()

    def wait(self, happened, what):
        end = time.monotonic() + PATIENCE
        while not happened():
            if time.monotonic() > end:
                pytest.fail(f"no {what} in {PATIENCE} s:\n{self.log()}")
            time.sleep(0.2)
            self.replace_pods()
