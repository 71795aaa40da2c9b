//! A service in Rust with one job, `hello`, due every second. Its sidecar is at `ANARCHON_ADDRESS`.

mod session;
/// What `make stubs LANG=rust` has written; of it the program uses the half.
#[allow(dead_code, clippy::all)]
#[rustfmt::skip]
#[path = "../../../../stubs/rust/anarchon.v1.rs"]
mod v1;

use std::{env, error::Error, net::SocketAddr, time::Duration};

use tonic::transport::Endpoint;

use session::Session;
use v1::{Assignment, EverySchedule, JobSpec, OverlapPolicy, job_spec::Schedule};

/// One thread for everything: a handler that blocks it stops the keep-alives, too.
#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let job = JobSpec {
        name: "hello".into(),
        schedule: Some(Schedule::Every(EverySchedule {
            period: Some(Duration::from_secs(1).try_into()?),
            offset: None,
        })),
        overlap: OverlapPolicy::Allow.into(),
        ..JobSpec::default()
    };
    let channel = Endpoint::from_shared(address()?)?.connect_lazy();
    Ok(Session::new(channel, job, hello).run().await?)
}

/// This program has no TLS, and a call without it must not leave the machine.
fn address() -> Result<String, String> {
    let said = env::var("ANARCHON_ADDRESS").unwrap_or_else(|_| "127.0.0.1:7420".into());
    match said.parse::<SocketAddr>() {
        Ok(address) if address.ip().is_loopback() => Ok(format!("http://{address}")),
        _ => Err(format!(
            "ANARCHON_ADDRESS is '{said}': it must be a port of the loopback, as in 127.0.0.1:7420"
        )),
    }
}

/// The handler. It is dropped at an `await` when it is to stop. A run that somebody triggered takes as many
/// milliseconds as its payload says.
async fn hello(run: Assignment) -> Result<String, String> {
    println!("hello: slot {}, attempt {}", run.slot, run.attempt);
    let payload = String::from_utf8_lossy(&run.payload);
    let payload = payload.trim();
    if !payload.is_empty() {
        let takes_ms = payload.parse().map_err(|error| {
            format!("payload '{payload}' is no number of milliseconds: {error}")
        })?;
        tokio::time::sleep(Duration::from_millis(takes_ms)).await;
    }
    Ok(format!("hello from Rust, fence {}", run.fence))
}
