//! An agent of the tests' own on a unix socket: it keeps reservations as the real one does,
//! sets the host end up on Attach, and fails where a test tells it to.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use skein_cni::agent::{
    AgentError, Attachment, MAX_REQUEST_BYTES, Reply, Request, Reservation, read_message,
    write_message,
};
use skein_cni::netlink::Netlink;
use skein_cni::netns::Netns;

/// What the agent does with an Attach.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum OnAttach {
    SetUp,
    /// Says that it is attached and leaves the host end down.
    LeaveDown,
    Refuse,
    HangUp,
    /// Never answers, until the plugin is gone.
    Wait,
}

pub struct State {
    pub requests: Vec<Request>,
    pub reserved: BTreeMap<Attachment, Reservation>,
    pub attached: BTreeMap<Attachment, u32>,
    pub on_attach: OnAttach,
    pub refuse_add: bool,
    pub ips: Vec<IpAddr>,
    pub disable_features: Vec<String>,
}

pub struct FakeAgent {
    pub socket: PathBuf,
    pub state: Arc<Mutex<State>>,
    listener: Option<JoinHandle<()>>,
}

impl FakeAgent {
    /// Serves on `socket` from inside `host`.
    pub fn start(socket: &Path, host: &Netns) -> Self {
        let state = Arc::new(Mutex::new(State {
            requests: Vec::new(),
            reserved: BTreeMap::new(),
            attached: BTreeMap::new(),
            on_attach: OnAttach::SetUp,
            refuse_add: false,
            ips: vec!["10.7.0.2".parse().unwrap(), "fd00:7::2".parse().unwrap()],
            disable_features: [
                "tx-udp-segmentation",
                "tx-gso-list",
                "tx-of-an-older-kernel",
            ]
            .map(str::to_owned)
            .to_vec(),
        }));
        let listener = UnixListener::bind(socket).unwrap();
        let shared = Arc::clone(&state);
        let host = Netns::open(host.path()).unwrap();
        let listener = thread::spawn(move || {
            for stream in listener.incoming() {
                let stream = stream.unwrap();
                if serve(&shared, &host, stream) == Next::Stop {
                    return;
                }
            }
        });
        Self {
            socket: socket.to_owned(),
            state,
            listener: Some(listener),
        }
    }

    pub fn with<T>(&self, work: impl FnOnce(&mut State) -> T) -> T {
        work(&mut self.state.lock().unwrap())
    }

    /// Names of the requests so far, in order.
    pub fn requests(&self) -> Vec<&'static str> {
        self.with(|state| state.requests.iter().map(name).collect())
    }

    /// Stops serving and removes the socket: the agent is down.
    pub fn stop(&mut self) {
        if let Some(listener) = self.listener.take() {
            let mut stream = UnixStream::connect(&self.socket).unwrap();
            let stop = Request::View {
                name: "stop".into(),
            };
            write_message(&mut stream, &stop).unwrap();
            listener.join().unwrap();
            std::fs::remove_file(&self.socket).unwrap();
        }
    }
}

impl Drop for FakeAgent {
    fn drop(&mut self) {
        if !thread::panicking() {
            self.stop();
        }
    }
}

#[derive(PartialEq, Eq)]
enum Next {
    Go,
    Stop,
}

fn name(request: &Request) -> &'static str {
    match request {
        Request::Add { .. } => "add",
        Request::Attach { .. } => "attach",
        Request::Del { .. } => "del",
        Request::Check { .. } => "check",
        Request::Gc { .. } => "gc",
        Request::Status => "status",
        Request::View { .. } | Request::Ask { .. } => "view",
    }
}

/// One connection. Reservations that it made and did not attach end with it.
fn serve(state: &Mutex<State>, host: &Netns, mut stream: UnixStream) -> Next {
    let mut pending = None;
    while let Ok(request) = read_message::<Request>(&mut stream, MAX_REQUEST_BYTES) {
        if matches!(request, Request::View { .. }) {
            return Next::Stop;
        }
        let on_attach = {
            let mut state = state.lock().unwrap();
            state.requests.push(request.clone());
            state.on_attach
        };
        match (&request, on_attach) {
            (Request::Attach { .. }, OnAttach::HangUp) => break,
            (Request::Attach { .. }, OnAttach::Wait) => {
                // End of file comes when the plugin is gone.
                let _ = read_message::<Request>(&mut stream, MAX_REQUEST_BYTES);
                break;
            }
            _ => {}
        }
        let reply = answer(&mut state.lock().unwrap(), host, &request);
        match (&request, &reply) {
            (Request::Add { attachment, .. }, Reply::Reserved(_)) => {
                pending = Some(attachment.clone());
            }
            (Request::Attach { .. }, Reply::Attached) => pending = None,
            _ => {}
        }
        if write_message(&mut stream, &reply).is_err() {
            break;
        }
    }
    if let Some(attachment) = pending {
        state.lock().unwrap().reserved.remove(&attachment);
    }
    Next::Go
}

fn refusal(msg: &str) -> Reply {
    Reply::Error(AgentError {
        code: 11,
        msg: msg.into(),
        details: "try again".into(),
    })
}

fn answer(state: &mut State, host: &Netns, request: &Request) -> Reply {
    match request {
        Request::Add { .. } if state.refuse_add => refusal("no address left"),
        Request::Add {
            attachment,
            ips,
            mac,
            mtu,
            ..
        } => {
            let reservation = Reservation {
                host_ifname: "skein7".into(),
                pod_mac: mac.clone().unwrap_or("02:00:00:00:07:02".into()),
                host_mac: "02:00:00:00:07:01".into(),
                ips: if ips.is_empty() {
                    state.ips.clone()
                } else {
                    ips.clone()
                },
                device_mtu: 65535,
                route_mtu: mtu.unwrap_or(1450),
                disable_features: state.disable_features.clone(),
                queues: 2,
            };
            state
                .reserved
                .insert(attachment.clone(), reservation.clone());
            Reply::Reserved(reservation)
        }
        Request::Attach {
            attachment,
            ifindex,
        } => {
            if state.on_attach == OnAttach::Refuse {
                return refusal("workers did not answer");
            }
            if state.on_attach == OnAttach::SetUp {
                host.run(|| Netlink::open().unwrap().set_link_up(*ifindex, true))
                    .unwrap()
                    .unwrap();
            }
            state.attached.insert(attachment.clone(), *ifindex);
            Reply::Attached
        }
        Request::Del { attachment } => {
            state.reserved.remove(attachment);
            state.attached.remove(attachment);
            Reply::Done
        }
        Request::Check { attachment } => match state.reserved.get(attachment) {
            Some(reservation) => Reply::Reserved(reservation.clone()),
            None => refusal("no such endpoint"),
        },
        Request::Gc { valid, .. } => {
            state.reserved.retain(|key, _| valid.contains(key));
            Reply::Done
        }
        Request::Status | Request::View { .. } | Request::Ask { .. } => Reply::Done,
    }
}
