"""A kubelet's calls, by raw gRPC: CRI's runtime and image services of a containerd.

Pods use the host's network, so that no CNI is needed. Field numbers: CRI's api.proto, v1.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc

from snapshotter.containerd.messages import Message, MessageType, build

NAMESPACE = "k8s.io"
"""The namespace of containerd that CRI has everything in."""
_HOST_NETWORK = 2
_TIMEOUT_S = 120.0
_TABLE = {
    "ImageSpec": "1 image s",
    "PullImageRequest": "1 image ImageSpec",
    "PullImageResponse": "1 image_ref s",
    "RemoveImageRequest": "1 image ImageSpec",
    "NamespaceOption": "1 network i",
    "SandboxSecurity": "1 namespace_options NamespaceOption",
    "LinuxSandbox": "2 security_context SandboxSecurity",
    "SandboxMetadata": "1 name s, 2 uid s, 3 namespace s",
    "SandboxConfig": "1 metadata SandboxMetadata, 3 log_directory s, 8 linux LinuxSandbox",
    "RunPodSandboxRequest": "1 config SandboxConfig",
    "RunPodSandboxResponse": "1 pod_sandbox_id s",
    "PodRequest": "1 pod_sandbox_id s",
    "ContainerSecurity": "3 namespace_options NamespaceOption",
    "LinuxContainer": "2 security_context ContainerSecurity",
    "ContainerMetadata": "1 name s",
    "ContainerConfig": "1 metadata ContainerMetadata, 2 image ImageSpec, 3 command s*, "
    "11 log_path s, 15 linux LinuxContainer",
    "CreateContainerRequest": "1 pod_sandbox_id s, 2 config ContainerConfig, "
    "3 sandbox_config SandboxConfig",
    "ContainerIdMessage": "1 container_id s",
    "ExecSyncRequest": "1 container_id s, 2 cmd s*, 3 timeout l",
    "ExecSyncResponse": "1 stdout y, 2 stderr y, 3 exit_code i",
    "Nothing": "",
}
_MESSAGES: dict[str, MessageType] = build(_TABLE)


class Cri:
    """Pods of one container each; all of them end with the context."""

    def __init__(self, address: Path, logs: Path) -> None:
        self._channel = grpc.insecure_channel(f"unix://{address}")
        self._logs = logs
        self._pods: list[str] = []
        self._numbers = itertools.count(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.remove_pods()
        finally:
            self._channel.close()

    def pull(self, reference: str) -> str:
        """Pulls an image; the id that CRI gives it."""
        request = _MESSAGES["PullImageRequest"](image=_image(reference))
        return str(self._call("ImageService", "PullImage", request, "PullImageResponse").image_ref)

    def remove_image(self, reference: str) -> None:
        """Removes an image."""
        request = _MESSAGES["RemoveImageRequest"](image=_image(reference))
        self._call("ImageService", "RemoveImage", request, "Nothing")

    def start(self, reference: str, *command: str) -> str:
        """Starts a container in a pod of its own; its id."""
        number = next(self._numbers)
        sandbox = self._sandbox(f"pod-{number}")
        request = _MESSAGES["RunPodSandboxRequest"](config=sandbox)
        ran = self._call("RuntimeService", "RunPodSandbox", request, "RunPodSandboxResponse")
        self._pods.append(str(ran.pod_sandbox_id))
        config = _MESSAGES["ContainerConfig"](
            metadata=_MESSAGES["ContainerMetadata"](name=f"container-{number}"),
            image=_image(reference),
            command=list(command),
            log_path=f"{number}.log",
            linux=_MESSAGES["LinuxContainer"](
                security_context=_MESSAGES["ContainerSecurity"](namespace_options=_host_network())
            ),
        )
        asked = _MESSAGES["CreateContainerRequest"](
            pod_sandbox_id=ran.pod_sandbox_id, config=config, sandbox_config=sandbox
        )
        made = self._call("RuntimeService", "CreateContainer", asked, "ContainerIdMessage")
        self._call("RuntimeService", "StartContainer", made, "Nothing")
        return str(made.container_id)

    def exec(self, container: str, *command: str) -> str:
        """Runs a command in a container, which must succeed; what it printed."""
        request = _MESSAGES["ExecSyncRequest"](
            container_id=container, cmd=list(command), timeout=int(_TIMEOUT_S)
        )
        done = self._call("RuntimeService", "ExecSync", request, "ExecSyncResponse")
        if done.exit_code:
            raise RuntimeError(f"{command} in {container}: {done.stderr!r}")
        return bytes(done.stdout).decode()

    def remove_pods(self) -> None:
        """Ends all pods with their containers."""
        while self._pods:
            request = _MESSAGES["PodRequest"](pod_sandbox_id=self._pods.pop())
            self._call("RuntimeService", "StopPodSandbox", request, "Nothing")
            self._call("RuntimeService", "RemovePodSandbox", request, "Nothing")

    def _sandbox(self, name: str) -> Message:
        security = _MESSAGES["SandboxSecurity"](namespace_options=_host_network())
        return _MESSAGES["SandboxConfig"](
            metadata=_MESSAGES["SandboxMetadata"](name=name, uid=name, namespace="default"),
            log_directory=str(self._logs),
            linux=_MESSAGES["LinuxSandbox"](security_context=security),
        )

    def _call(self, service: str, method: str, request: Message, answer: str) -> Message:
        call = self._channel.unary_unary(
            f"/runtime.v1.{service}/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=_MESSAGES[answer].FromString,
        )
        response: Message = call(request, timeout=_TIMEOUT_S)
        return response


def _image(reference: str) -> Message:
    return _MESSAGES["ImageSpec"](image=reference)


def _host_network() -> Message:
    return _MESSAGES["NamespaceOption"](network=_HOST_NETWORK)
