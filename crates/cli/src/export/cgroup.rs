//! Finds the container and the pod of a process from the names of its cgroups. Each runtime and each cgroup driver uses
//! its own names.

/// The container or the pod that a process runs in.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Container {
    /// The id of the container, 64 hexadecimal digits.
    pub(super) id: Option<String>,
    /// The UID of the pod, as in the Kubernetes API.
    pub(super) pod: Option<String>,
}

/// Parses `groups`, the text of `/proc/PID/cgroup`: one line `number:controllers:path` for each hierarchy. Most of them
/// have the same path.
pub(super) fn container(groups: &str) -> Container {
    let mut found = Container::default();
    for path in groups.lines().filter_map(|line| line.splitn(3, ':').nth(2)) {
        // Use the innermost container: one may run inside another.
        for part in path.rsplit('/') {
            found.id = found.id.or_else(|| container_id(part));
            found.pod = found.pod.or_else(|| pod_uid(part));
        }
    }
    found
}

/// Finds the id in `ID`, `docker-ID.scope`, `cri-containerd-ID.scope`, and `kubepods-…-podUID.slice:cri-containerd:ID`.
fn container_id(part: &str) -> Option<String> {
    let part = part.strip_suffix(".scope").unwrap_or(part);
    let id = part.rsplit(['-', ':']).next()?;
    let is_id = id.len() == 64 && id.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_id.then(|| id.to_owned())
}

/// Finds the UID in `podUID` and `kubepods-burstable-podUID.slice`. Names of slices use `_` instead of `-`, because `-`
/// separates levels of slices.
fn pod_uid(part: &str) -> Option<String> {
    let (part, _) = part.split_once(':').unwrap_or((part, ""));
    let part = part.strip_suffix(".slice").unwrap_or(part);
    let (before, uid) = part.rsplit_once("pod")?;
    let is_uid =
        matches!(uid.len(), 32 | 36) && uid.bytes().all(|byte| byte.is_ascii_hexdigit() || b"-_".contains(&byte));
    let is_start = before.is_empty() || before.contains("kubepods") && before.ends_with('-');
    (is_uid && is_start).then(|| uid.replace('_', "-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "3f2a1c0d9b8e7f6a5b4c3d2e1f0a9b8c7d6e5f4a3b2c1d0e9f8a7b6c5d4e3f2a";
    const POD: &str = "8a5f1b9e-2c3d-4e5f-8a9b-0c1d2e3f4a5b";

    #[track_caller]
    fn is(groups: &str, id: Option<&str>, pod: Option<&str>) {
        let (slice, pod) = (POD.replace('-', "_"), pod.map(str::to_owned));
        let groups = groups.replace("ID", ID).replace("SLICE", &slice).replace("POD", POD);
        assert_eq!(container(&groups), Container { id: id.map(str::to_owned), pod }, "{groups}");
    }

    #[test]
    fn each_runtime_and_each_driver_of_cgroups() {
        let both = |groups| is(groups, Some(ID), Some(POD));
        // Version 2 with containerd and the systemd driver. Guaranteed pods have no class.
        both("0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podSLICE.slice/cri-containerd-ID.scope\n");
        both("0::/kubepods.slice/kubepods-podSLICE.slice/cri-containerd-ID.scope\n");
        // A node of kind (Kubernetes in Docker) is a container.
        both(
            "0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/\
             kubelet-kubepods-besteffort-podSLICE.slice/cri-containerd-ID.scope\n",
        );
        // Version 2 with containerd and CRI-O, and the cgroupfs driver.
        both("0::/kubepods/burstable/podPOD/ID\n");
        both("0::/kubepods/besteffort/podPOD/crio-ID\n");
        // CRI-O with systemd. The process may be in a group below its container's.
        both(
            "0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-podSLICE.slice/crio-ID.scope/container\n",
        );
        // Version 1, with one line for each controller.
        both(
            "12:memory:/kubepods/burstable/podPOD/ID\n11:cpu,cpuacct:/kubepods/burstable/podPOD/ID\n1:name=systemd:/kubepods/burstable/podPOD/ID\n0::/\n",
        );
        both("5:devices:/kubepods.slice/kubepods-podSLICE.slice/docker-ID.scope\n");
        // containerd 1 under systemd, without the option SystemdCgroup.
        both("0::/system.slice/containerd.service/kubepods-burstable-podSLICE.slice:cri-containerd:ID\n");
        // Docker without Kubernetes, with systemd and with cgroupfs.
        is("0::/system.slice/docker-ID.scope\n", Some(ID), None);
        is("9:memory:/docker/ID\n0::/docker/ID\n", Some(ID), None);
        // Podman.
        is("0::/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-ID.scope/container\n", Some(ID), None);
    }

    #[test]
    fn static_pods_have_a_hash_and_no_dashes() {
        let hash = "0123456789abcdef0123456789abcdef";
        is(&format!("0::/kubepods/burstable/pod{hash}/ID\n"), Some(ID), Some(hash));
    }

    #[test]
    fn the_innermost_container_counts() {
        let outer = "f".repeat(64);
        is(&format!("0::/docker/{outer}/kubepods/podPOD/ID\n"), Some(ID), Some(POD));
    }

    #[test]
    fn what_is_no_container() {
        for groups in [
            "",
            "0::/\n",
            "0::/user.slice/user-1000.slice/session-2.scope\n",
            "0::/system.slice/podman.service\n",
            "0::/init.scope\nbroken\n",
            "0::/tripod8a5f1b9e2c3d4e5f8a9b0c1d2e3f4a5b/x\n",
            "0::/docker/short\n",
        ] {
            is(groups, None, None);
        }
    }
}
