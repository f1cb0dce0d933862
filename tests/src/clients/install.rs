//! Installs the pinned clients below the build folder, once; later runs find them there.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use relay_testkit::binaries;
use tokio::process::Command;

/// File with the installed pins; written last, so that an interrupted installation is repeated.
const MARKER: &str = "installed.txt";

/// Returns the folder with the scripts and the npm packages of `package-lock.json`.
pub async fn npm_packages() -> Result<PathBuf> {
    let pins = fs::read_to_string(sources().join("package-lock.json"))?;
    let dir = install("npm", &pins, async |dir| {
        for file in ["package.json", "package-lock.json"] {
            fs::copy(sources().join(file), dir.join(file))?;
        }
        let mut npm = Command::new("npm");
        npm.args(["ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]).current_dir(dir);
        run(npm, "npm").await
    })
    .await?;
    // Node resolves packages relative to the script, so the scripts are copied.
    for entry in fs::read_dir(sources())? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "mjs") {
            let name = path.file_name().context("a script's name")?;
            let fresh = dir.join(format!(".{}-{}", std::process::id(), name.display()));
            fs::copy(&path, &fresh)?;
            // Another test may be reading the file now.
            fs::rename(&fresh, dir.join(name))?;
        }
    }
    Ok(dir)
}

/// Returns the folder with the Python packages of `requirements.txt`, for `PYTHONPATH`.
pub async fn python_packages() -> Result<PathBuf> {
    pip_packages("python", &sources().join("requirements.txt")).await
}

/// Returns the folder with the published command line.
pub async fn command_line() -> Result<PathBuf> {
    let source = sources().join("command_line/package.json");
    let pins = fs::read_to_string(&source)?;
    install("command-line", &pins, async |dir| {
        fs::copy(&source, dir.join("package.json"))?;
        let mut npm = Command::new("npm");
        npm.args(["install", "--omit=optional", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]);
        npm.current_dir(dir);
        run(npm, "npm").await
    })
    .await
}

/// Returns the folder with the published Python client of a broker, for `PYTHONPATH`.
pub async fn python_broker_packages() -> Result<PathBuf> {
    pip_packages("python-broker", &sources().join("broker_requirements.txt")).await
}

/// Returns the folder with schemathesis, for `PYTHONPATH`.
pub async fn schemathesis() -> Result<PathBuf> {
    pip_packages("schemathesis", &sources().join("schemathesis.txt")).await
}

/// Returns the folder with our runner package for Node.js, built, and what it needs.
pub async fn runner_package() -> Result<PathBuf> {
    let source = runners().join("typescript");
    let files = files_below(&source)?;
    let mut content = String::new();
    for file in &files {
        content += &fs::read_to_string(source.join(file)).with_context(|| format!("read {}", file.display()))?;
    }
    install("runner", &content, async |dir| {
        for file in &files {
            let target = dir.join(file);
            fs::create_dir_all(target.parent().context("a file's folder")?)?;
            fs::copy(source.join(file), target)?;
        }
        // Not `npm ci`: it insists on optional packages for other platforms, which a registry may lack.
        let install = ["install", "--no-save", "--omit=optional", "--ignore-scripts", "--no-audit", "--no-fund"];
        for args in [&install[..], &["run", "build"]] {
            let mut npm = Command::new("npm");
            npm.args(args).current_dir(dir);
            run(npm, "npm").await?;
        }
        Ok(())
    })
    .await
}

/// Returns the folder of the runner packages and their transcript.
pub fn runners() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("runners")
}

/// Files of a package, without those that were installed or built.
fn files_below(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for part in ["", "src", "test", "example"] {
        for entry in fs::read_dir(folder.join(part))? {
            let entry = entry?;
            if entry.file_type()?.is_file() {
                files.push(Path::new(part).join(entry.file_name()));
            }
        }
    }
    files.sort();
    Ok(files)
}

/// Returns the folder with the packages that our runner package for Python needs, for `PYTHONPATH`.
pub async fn python_runner_packages() -> Result<PathBuf> {
    pip_packages("python-runner", &runners().join("python/requirements.txt")).await
}

async fn pip_packages(name: &str, requirements: &Path) -> Result<PathBuf> {
    let version = Command::new("python3").arg("--version").output().await.context("run python3")?;
    let pins = format!("{}{}", String::from_utf8_lossy(&version.stdout), fs::read_to_string(requirements)?);
    install(name, &pins, async |dir| {
        let mut pip = Command::new("python3");
        pip.args(["-m", "pip", "install", "--quiet", "--only-binary", ":all:", "--upgrade", "--target"]);
        pip.arg(dir).arg("--requirement").arg(requirements);
        run(pip, "pip").await
    })
    .await
}

/// Returns the folder of the scripts.
pub fn scripts() -> PathBuf {
    sources().to_owned()
}

/// Returns the folder with the scripts and pins.
pub(super) fn sources() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/clients"))
}

async fn install(name: &str, pins: &str, fill: impl AsyncFnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    let parent = binaries::directory()?.join("clients");
    fs::create_dir_all(&parent)?;
    // Tests are separate processes: the first one installs, the others wait for it.
    let lock = File::create(parent.join(format!("{name}.lock")))?;
    let lock = tokio::task::spawn_blocking(move || lock.lock().map(|()| lock)).await??;
    let dir = parent.join(name);
    if fs::read_to_string(dir.join(MARKER)).is_ok_and(|installed| installed == pins) {
        return Ok(dir);
    }
    if dir.exists() {
        fs::remove_dir_all(&dir)?;
    }
    fs::create_dir_all(&dir)?;
    fill(&dir).await.with_context(|| format!("install the {name} clients"))?;
    fs::write(dir.join(MARKER), pins)?;
    drop(lock);
    Ok(dir)
}

async fn run(mut command: Command, what: &str) -> Result<()> {
    let output = command.output().await.with_context(|| format!("run {what}: is it installed?"))?;
    ensure!(
        output.status.success(),
        "{what} could not install the published clients ({}); these tests need the public package registry:\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}
