//! A process whose tasks are supervised as those of the services are: `tests/release.rs` breaks it, compiled as a
//! release.
//!
//! Serves a socket of lines and, on a second port, the pages `/ready` and `/metrics`. It prints both addresses. A
//! client of the socket ends a task by name: `panic connection`, `panic reader`, `return reader`. Other lines are
//! echoed.

use std::{
    collections::BTreeMap,
    io,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};
use relay_tasks::{TaskSet, isolate, metric_names::TASK_PANICS, spawn_isolated};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    net::{TcpListener, TcpStream},
    sync::mpsc,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// Time that the peers have to say goodbye when the process stops.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let panics = TaskPanics::default();
    metrics::set_global_recorder(panics.clone())?;
    let stopping = CancellationToken::new();
    let tasks = TaskSet::new(stopping.clone());
    let (orders, reader) = mpsc::channel(1);
    tasks.spawn("reader", read_orders(reader));

    let sockets = TcpListener::bind("127.0.0.1:0").await?;
    let pages = TcpListener::bind("127.0.0.1:0").await?;
    print_address("socket", &sockets)?;
    print_address("pages", &pages)?;
    // Serves until the end of the process, so that readiness shows the stop.
    spawn_isolated("pages", serve_pages(pages, stopping.clone(), panics));
    let connections = TaskTracker::new();
    while let Some(accepted) = stopping.run_until_cancelled(sockets.accept()).await {
        let (socket, _) = accepted?;
        let connection = serve_connection(socket, orders.clone(), stopping.clone());
        connections.spawn(async move { isolate("connection", connection).await });
    }
    connections.close();
    let _ = tokio::time::timeout(DRAIN_TIMEOUT, connections.wait()).await;
    Ok(tasks.check()?)
}

#[expect(clippy::print_stdout, reason = "the test reads the addresses")]
fn print_address(name: &str, listener: &TcpListener) -> io::Result<()> {
    println!("{name} {}", listener.local_addr()?);
    Ok(())
}

/// The long-running task: lives until it is ordered to end.
async fn read_orders(mut orders: mpsc::Receiver<bool>) {
    if let Some(true) = orders.recv().await {
        panic!("ordered to panic");
    }
}

/// Echoes lines. Asks the peer to leave when the process stops.
async fn serve_connection(mut socket: TcpStream, orders: mpsc::Sender<bool>, stopping: CancellationToken) {
    let (read, mut write) = socket.split();
    let mut lines = BufReader::new(read).lines();
    let mut is_asked = false;
    loop {
        let line = tokio::select! {
            line = lines.next_line() => line,
            () = stopping.cancelled(), if !is_asked => {
                is_asked = true;
                Ok(Some("draining".to_owned()))
            }
        };
        let Ok(Some(line)) = line else { return };
        match line.as_str() {
            "panic connection" => panic!("ordered to panic"),
            "panic reader" | "return reader" => {
                let _ = orders.send(line.starts_with("panic")).await;
            }
            "bye" => return,
            _ if write.write_all(format!("{line}\n").as_bytes()).await.is_err() => return,
            _ => {}
        }
    }
}

async fn serve_pages(listener: TcpListener, stopping: CancellationToken, panics: TaskPanics) {
    while let Ok((mut socket, _)) = listener.accept().await {
        let mut lines = BufReader::new(&mut socket).lines();
        let Ok(Some(request)) = lines.next_line().await else { continue };
        while lines.next_line().await.is_ok_and(|line| line.is_some_and(|line| !line.is_empty())) {}
        let page = async {
            match request.split(' ').nth(1) {
                Some("/ready") if stopping.is_cancelled() => (503, "not ready".to_owned()),
                Some("/ready") => (200, "ready".to_owned()),
                Some("/metrics") => (200, panics.render()),
                _ => panic!("no such page"),
            }
        };
        // As the gateway's layer: the panic of a request is a 500.
        let (status, body) = isolate("request", page).await.unwrap_or((500, String::new()));
        let head = format!("HTTP/1.1 {status} -\r\nConnection: close\r\nContent-Length: {}\r\n\r\n", body.len());
        let _ = socket.write_all((head + &body).as_bytes()).await;
    }
}

/// Recorder of [`TASK_PANICS`], by task.
#[derive(Clone, Default)]
struct TaskPanics(Arc<Mutex<BTreeMap<String, Arc<AtomicU64>>>>);

impl TaskPanics {
    fn render(&self) -> String {
        let panics = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        panics.iter().map(|(task, count)| format!("{task} {}\n", count.load(Ordering::Relaxed))).collect()
    }
}

impl Recorder for TaskPanics {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        let Some(task) = key.labels().find(|label| key.name() == TASK_PANICS && label.key() == "task") else {
            return Counter::noop();
        };
        let mut panics = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Counter::from_arc(Arc::clone(panics.entry(task.value().to_owned()).or_default()))
    }

    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}
