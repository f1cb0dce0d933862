//! Supervision in a release binary: `examples/supervised.rs`, compiled with the release profile, loses its tasks.

use std::{
    env,
    error::Error,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::TcpStream,
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    time::Duration,
};

type Outcome = Result<(), Box<dyn Error>>;

/// Bound of every read.
const PATIENCE: Duration = Duration::from_secs(20);

/// The program as a process, which is killed with the test.
struct Supervised {
    child: Child,
    socket: String,
    pages: String,
}

impl Drop for Supervised {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Supervised {
    /// Compiles the program as a release, without the workspace's features, and starts it.
    fn start() -> Result<Self, Box<dyn Error>> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let built = Command::new(cargo)
            .current_dir(&root)
            .args(["build", "--release", "--locked", "--package", "relay-tasks", "--example", "supervised"])
            .args(["--no-default-features", "--message-format", "json-render-diagnostics"])
            // Panics unwind the same way without these, and the program compiles in half the time.
            .envs([("CARGO_PROFILE_RELEASE_LTO", "off"), ("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16")])
            .stderr(Stdio::inherit())
            .output()?;
        let messages = String::from_utf8(built.stdout)?;
        let executable = messages.rsplit_once(r#""executable":""#).and_then(|(_, rest)| rest.split('"').next());
        let program = executable.filter(|_| built.status.success()).ok_or("cargo built no program")?;
        let mut child = Command::new(program).stdout(Stdio::piped()).spawn()?;
        let mut addresses = BufReader::new(child.stdout.take().ok_or("no stdout")?).lines();
        let mut address = |name: &str| {
            let line = addresses.next().ok_or("the program ended early")??;
            let address = line.strip_prefix(name).ok_or_else(|| format!("unexpected line {line}"))?;
            Ok::<_, Box<dyn Error>>(address.trim().to_owned())
        };
        let (socket, pages) = (address("socket")?, address("pages")?);
        Ok(Self { child, socket, pages })
    }

    fn connect(&self) -> Result<Peer, Box<dyn Error>> {
        let socket = TcpStream::connect(&self.socket)?;
        socket.set_read_timeout(Some(PATIENCE))?;
        Ok(Peer(BufReader::new(socket)))
    }

    /// Returns the status and the body of a page.
    fn page(&self, path: &str) -> Result<(u16, String), Box<dyn Error>> {
        let mut socket = TcpStream::connect(&self.pages)?;
        socket.set_read_timeout(Some(PATIENCE))?;
        write!(socket, "GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n")?;
        let mut text = String::new();
        socket.read_to_string(&mut text)?;
        let (head, body) = text.split_once("\r\n\r\n").ok_or("no response")?;
        let status = head.split(' ').nth(1).ok_or("no status")?;
        Ok((status.parse()?, body.to_owned()))
    }

    fn wait_for_exit(mut self) -> Result<ExitStatus, Box<dyn Error>> {
        Ok(self.child.wait()?)
    }
}

/// Client of the socket.
struct Peer(BufReader<TcpStream>);

impl Peer {
    fn send(&mut self, line: &str) -> Outcome {
        Ok(writeln!(self.0.get_mut(), "{line}")?)
    }

    /// Returns the next line; `None` if the process closed the socket.
    fn read(&mut self) -> Result<Option<String>, Box<dyn Error>> {
        let mut line = String::new();
        let read = self.0.read_line(&mut line)?;
        Ok((read > 0).then(|| line.trim_end().to_owned()))
    }

    fn expect_echo(&mut self, line: &str) -> Outcome {
        self.send(line)?;
        assert_eq!(self.read()?.as_deref(), Some(line));
        Ok(())
    }
}

#[test]
fn the_end_of_a_long_running_task_stops_the_process_after_its_sockets() -> Outcome {
    for order in ["panic reader", "return reader"] {
        let process = Supervised::start()?;
        let (mut ada, mut bob) = (process.connect()?, process.connect()?);
        ada.expect_echo("hello")?;
        bob.expect_echo("hello")?;
        assert_eq!(process.page("/ready")?.0, 200, "{order}");
        ada.send(order)?;
        // The sockets are open and served while readiness shows the stop.
        assert_eq!(bob.read()?.as_deref(), Some("draining"), "{order}");
        assert_eq!(process.page("/ready")?.0, 503, "{order}");
        bob.expect_echo("still here")?;
        bob.send("bye")?;
        assert_eq!(bob.read()?, None, "{order}");
        assert_eq!(ada.read()?.as_deref(), Some("draining"), "{order}");
        ada.send("bye")?;
        assert_eq!(ada.read()?, None, "{order}");
        assert_eq!(process.wait_for_exit()?.code(), Some(1), "{order}");
    }
    Ok(())
}

#[test]
fn a_panic_of_one_connection_or_request_is_counted_and_ends_nothing_else() -> Outcome {
    let process = Supervised::start()?;
    let (mut ada, mut bob) = (process.connect()?, process.connect()?);
    bob.expect_echo("hello")?;
    ada.send("panic connection")?;
    assert_eq!(ada.read()?, None, "the connection that panicked is closed");
    assert_eq!(process.page("/nowhere")?.0, 500, "the request that panicked is answered");
    bob.expect_echo("still here")?;
    assert_eq!(process.page("/metrics")?, (200, "connection 1\nrequest 1\n".to_owned()));
    assert_eq!(process.page("/ready")?.0, 200);
    Ok(())
}

#[test]
fn no_profile_aborts_on_a_panic() -> Outcome {
    let manifest = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../Cargo.toml"))?;
    let profiles = manifest.split("\n[").filter(|section| section.starts_with("profile."));
    for profile in profiles {
        assert!(!profile.lines().any(|line| line.starts_with("panic")), "isolated tasks rely on unwinding: [{profile}");
    }
    Ok(())
}
