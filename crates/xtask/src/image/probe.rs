//! Probe of the machine's ability to run containers at all, with a program that is not ours, in an image that is not
//! ours. What fails after that is the engine's fault, or its image's or its chart's.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::{Storage, storage};

const TAG: &str = "localhost/relay-probe:1";
const CONTAINERFILE: &str = "FROM scratch\nCOPY . /\nUSER 65532:65532\nCMD [\"/bin/true\"]\n";

/// A pod with what the chart's pods have: the host's network, a user without rights, a read-only root, a limit of
/// memory, a volume.
const POD: &str = r#"
apiVersion: v1
kind: Pod
metadata: {name: probe}
spec:
  hostNetwork: true
  restartPolicy: Never
  securityContext: {runAsNonRoot: true, runAsUser: 65532, runAsGroup: 65532, seccompProfile: {type: RuntimeDefault}}
  containers:
    - name: probe
      image: localhost/relay-probe:1
      imagePullPolicy: Never
      command: [/bin/true]
      securityContext: {allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
      resources: {requests: {cpu: 50m, memory: 64Mi}, limits: {memory: 128Mi}}
      volumeMounts: [{name: tmp, mountPath: /tmp}]
  volumes: [{name: tmp, emptyDir: {}}]
"#;

/// Why not, if they cannot. An error means that even the question could not be put.
pub(super) fn obstacle(storage: &Storage) -> Result<Option<String>> {
    for tool in ["buildah", "podman"] {
        if Command::new(tool).arg("--version").output().is_err() {
            return Ok(Some(format!("{tool} is not installed")));
        }
    }
    let dir = storage.fresh_dir("probe");
    let root = dir.join("root");
    gather(&root)?;
    let (file, pod) = (dir.join("Containerfile"), dir.join("pod.yaml"));
    fs::write(&file, CONTAINERFILE)?;
    fs::write(&pod, POD)?;

    let mut bud = storage.buildah();
    bud.args(["bud", "--quiet", "--isolation", "chroot", "--tag", TAG, "--file"]).arg(&file).arg(&root);
    let mut alone = storage.podman();
    alone.args(["run", "--rm", "--network", "host", TAG]);
    let mut play = storage.podman();
    play.args(["kube", "play"]).arg(&pod);
    let steps = [
        ("buildah cannot make an image from scratch with /bin/true in it", bud),
        ("podman cannot run /bin/true in an image from scratch", alone),
        ("podman cannot run a pod with /bin/true in it", play),
    ];
    for (what, mut step) in steps {
        if let Err(error) = storage::run(&mut step) {
            return Ok(Some(format!("{what}: {error:#}")));
        }
    }
    let ended = storage::run(storage.podman().args(["wait", "probe-probe"]));
    let outcome = match ended {
        Ok(code) if code.trim() == "0" => None,
        Ok(code) => Some(format!("/bin/true in a pod ended with {}", code.trim())),
        Err(error) => Some(format!("podman cannot wait for a pod: {error:#}")),
    };
    storage::run(storage.podman().args(["pod", "rm", "--force", "probe"]))?;
    Ok(outcome)
}

/// `/bin/true` and the libraries that it names.
fn gather(root: &Path) -> Result<()> {
    let program = Path::new("/bin/true");
    // `ldd` fails for a static program, which needs no libraries.
    let libraries = storage::run(Command::new("ldd").arg(program)).unwrap_or_default();
    let named = libraries.split_whitespace().filter(|word| word.starts_with('/'));
    for path in named.map(PathBuf::from).chain([program.to_owned()]) {
        let inside = root.join(path.strip_prefix("/")?);
        fs::create_dir_all(inside.parent().context("a file in no folder")?)?;
        fs::copy(&path, &inside).with_context(|| format!("copy {}", path.display()))?;
    }
    Ok(())
}
