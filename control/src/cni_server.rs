//! The agent's socket: frames in and out, and what a broken connection means.
//!
//! Serves the CNI plugin and `skeinctl` alike. A connection keeps one thing: the attachment
//! whose ADD is between its halves. When it ends there, for whatever reason, the reservation is
//! given back. Connections are numbered, so that one that ends late gives back its own
//! reservation and not that of a later ADD of the same interface. What the requests do is the
//! [`Backend`]'s.

use std::fs;
use std::future::Future;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use skein_cni::agent::{Attachment, MAX_REQUEST_BYTES, Reply, Request};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;

use crate::endpoint::{agent_error, code};

/// Connections served at a time; further ones wait in the socket's queue.
const MAX_CONNECTIONS: usize = 1024;

/// A connection on which nothing comes for this long has ended: between the halves of an ADD
/// the plugin makes a veth, which takes milliseconds.
const IDLE: Duration = Duration::from_secs(60);

/// Number of a connection, never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionId(pub u64);

/// What answers requests.
pub trait Backend: Clone + Send + Sync + 'static {
    /// Answers a request of that connection.
    fn call(
        &self,
        connection: ConnectionId,
        request: Request,
    ) -> impl Future<Output = Reply> + Send;

    /// The connection of an ADD ended between its halves.
    fn abandon(
        &self,
        connection: ConnectionId,
        attachment: Attachment,
    ) -> impl Future<Output = ()> + Send;
}

/// Why the socket cannot be had.
#[derive(Debug, thiserror::Error)]
#[error("agent socket {path}: {source}; see api.socket")]
pub struct SocketError {
    path: PathBuf,
    source: io::Error,
}

/// Opens the socket, for root alone. A socket that an earlier agent left is replaced: that no
/// agent runs is the lock's business.
pub fn listen(path: &Path) -> Result<UnixListener, SocketError> {
    let fault = |source| SocketError {
        path: path.to_owned(),
        source,
    };
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(fault)?;
    }
    // Under its name only once it is closed to others.
    let mut hidden = path.as_os_str().to_owned();
    hidden.push("~");
    let hidden = PathBuf::from(hidden);
    match fs::remove_file(&hidden) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(fault(error)),
        _ => {}
    }
    let listener = UnixListener::bind(&hidden).map_err(fault)?;
    fs::set_permissions(&hidden, fs::Permissions::from_mode(0o600)).map_err(fault)?;
    fs::rename(&hidden, path).map_err(fault)?;
    Ok(listener)
}

/// Serves until cancelled.
pub async fn serve(listener: UnixListener, backend: impl Backend) {
    let permits = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    for number in 0.. {
        let Ok(permit) = permits.clone().acquire_owned().await else {
            return;
        };
        match listener.accept().await {
            Ok((stream, _)) => {
                let backend = backend.clone();
                tokio::spawn(async move {
                    connection(stream, ConnectionId(number), backend).await;
                    drop(permit);
                });
            }
            Err(error) => {
                // Out of descriptors: wait for some to come back rather than spin.
                tracing::warn!(%error, "a connection to the agent's socket was not accepted");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn connection(mut stream: UnixStream, id: ConnectionId, backend: impl Backend) {
    let mut pending: Option<Attachment> = None;
    while let Ok(Some(request)) = read(&mut stream).await {
        let request = match serde_json::from_slice::<Request>(&request) {
            Ok(request) => request,
            Err(error) => {
                let error = agent_error(code::REFUSED, "not a request", error.to_string());
                let _ = write(&mut stream, &Reply::Error(error)).await;
                break;
            }
        };
        let reply = answer(request, id, &mut pending, &backend).await;
        if write(&mut stream, &reply).await.is_err() {
            break;
        }
    }
    if let Some(attachment) = pending {
        backend.abandon(id, attachment).await;
    }
}

/// Answers a request, and keeps the books of the ADD between its halves.
async fn answer(
    request: Request,
    id: ConnectionId,
    pending: &mut Option<Attachment>,
    backend: &impl Backend,
) -> Reply {
    let refused =
        |details: &str| Reply::Error(agent_error(code::REFUSED, "ADD out of order", details));
    match &request {
        Request::Add { attachment, .. } => {
            if pending.is_some() {
                return refused("this connection has an ADD whose second half is missing");
            }
            let attachment = attachment.clone();
            let reply = backend.call(id, request).await;
            if matches!(reply, Reply::Reserved(_)) {
                *pending = Some(attachment);
            }
            reply
        }
        Request::Attach { attachment, .. } => {
            if pending.as_ref() != Some(attachment) {
                return refused("there is no reservation of this connection to attach");
            }
            let reply = backend.call(id, request).await;
            // What did not attach is still pending, and given back with the connection.
            if matches!(reply, Reply::Attached) {
                *pending = None;
            }
            reply
        }
        Request::Del { attachment } => {
            // The plugin undoes its own ADD.
            if pending.as_ref() == Some(attachment) {
                *pending = None;
            }
            backend.call(id, request).await
        }
        Request::Check { .. }
        | Request::Gc { .. }
        | Request::Status
        | Request::View { .. }
        | Request::Ask { .. } => backend.call(id, request).await,
    }
}

/// One frame; `None` at the end.
async fn read(stream: &mut UnixStream) -> io::Result<Option<Vec<u8>>> {
    let frame = async {
        let mut header = [0; 4];
        if let Err(error) = stream.read_exact(&mut header).await {
            let ended = error.kind() == io::ErrorKind::UnexpectedEof;
            return if ended { Ok(None) } else { Err(error) };
        }
        let length = u32::from_be_bytes(header);
        if length > MAX_REQUEST_BYTES {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut body = vec![0; length as usize];
        stream.read_exact(&mut body).await?;
        Ok(Some(body))
    };
    tokio::time::timeout(IDLE, frame).await?
}

async fn write(stream: &mut UnixStream, reply: &Reply) -> io::Result<()> {
    let body = serde_json::to_vec(reply)?;
    let length = u32::try_from(body.len()).map_err(io::Error::other)?;
    let frame = async {
        stream.write_all(&length.to_be_bytes()).await?;
        stream.write_all(&body).await
    };
    tokio::time::timeout(IDLE, frame).await?
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream as Stream;
    use std::sync::Mutex;

    use skein_cni::agent::{Client, Reservation};

    use super::*;

    /// Answers like an agent without a datapath, and keeps what it was asked.
    #[derive(Clone, Default)]
    struct Fake {
        asked: Arc<Mutex<Vec<String>>>,
        fail_attach: bool,
    }

    impl Backend for Fake {
        async fn call(&self, _: ConnectionId, request: Request) -> Reply {
            let (name, reply) = match &request {
                Request::Add { attachment, .. } => (
                    format!("add {}", attachment.container_id),
                    Reply::Reserved(Reservation {
                        host_ifname: "sk0".into(),
                        pod_mac: "02:00:00:00:00:01".into(),
                        host_mac: "02:00:00:00:00:02".into(),
                        ips: vec![],
                        device_mtu: 1450,
                        route_mtu: 1450,
                        disable_features: vec![],
                        queues: 1,
                    }),
                ),
                Request::Attach { attachment, .. } if self.fail_attach => (
                    format!("attach {}", attachment.container_id),
                    Reply::Error(agent_error(code::TRY_AGAIN, "not now", "")),
                ),
                Request::Attach { attachment, .. } => (
                    format!("attach {}", attachment.container_id),
                    Reply::Attached,
                ),
                Request::View { name } => {
                    let document = serde_json::json!({ "view": name });
                    (format!("view {name}"), Reply::View { document })
                }
                other => (format!("{other:?}"), Reply::Done),
            };
            self.asked.lock().unwrap().push(name);
            reply
        }

        async fn abandon(&self, _: ConnectionId, attachment: Attachment) {
            let note = format!("abandon {}", attachment.container_id);
            self.asked.lock().unwrap().push(note);
        }
    }

    fn attachment() -> Attachment {
        Attachment {
            container_id: "c".into(),
            ifname: "eth0".into(),
        }
    }

    fn add() -> Request {
        Request::Add {
            attachment: attachment(),
            network: "skein".into(),
            netns: "/n".into(),
            pod: None,
            ips: vec![],
            mac: None,
            mtu: None,
        }
    }

    fn attach() -> Request {
        let attachment = attachment();
        Request::Attach {
            attachment,
            ifindex: 3,
        }
    }

    /// Runs a client against a server with that backend; returns what the backend was asked.
    fn with_server(fake: Fake, client: impl FnOnce(&Path) + Send) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/skein.sock");
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let listener = {
            let _context = runtime.enter();
            listen(&path).unwrap()
        };
        let asked = fake.asked.clone();
        let (done, is_done) = tokio::sync::oneshot::channel::<()>();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                client(&path);
                drop(done);
            });
            runtime.block_on(async {
                tokio::select! {
                    () = serve(listener, fake) => {}
                    _ = is_done => {}
                }
                // Connections that the client has just closed are still to be noticed.
                for _ in 0..100 {
                    tokio::task::yield_now().await;
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            });
        });
        let asked = asked.lock().unwrap();
        asked.clone()
    }

    fn connect(path: &Path) -> Client {
        Client::connect(path, Duration::from_secs(10)).unwrap()
    }

    #[test]
    fn an_add_of_two_halves() {
        let asked = with_server(Fake::default(), |path| {
            let mode = fs::metadata(path).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600);
            let mut client = connect(path);
            assert!(matches!(client.call(&add()).unwrap(), Reply::Reserved(_)));
            assert!(matches!(client.call(&attach()).unwrap(), Reply::Attached));
        });
        assert_eq!(asked, ["add c", "attach c"]);
    }

    #[test]
    fn a_connection_that_ends_between_the_halves_gives_back() {
        let asked = with_server(Fake::default(), |path| {
            connect(path).call(&add()).unwrap();
        });
        assert_eq!(asked, ["add c", "abandon c"]);
        let failing = Fake {
            fail_attach: true,
            ..Fake::default()
        };
        let asked = with_server(failing, |path| {
            let mut client = connect(path);
            client.call(&add()).unwrap();
            assert!(matches!(client.call(&attach()).unwrap(), Reply::Error(_)));
        });
        assert_eq!(asked, ["add c", "attach c", "abandon c"]);
        // A DEL on the same connection is the plugin's own undo.
        let asked = with_server(Fake::default(), |path| {
            let mut client = connect(path);
            client.call(&add()).unwrap();
            let attachment = attachment();
            client.call(&Request::Del { attachment }).unwrap();
        });
        assert_eq!(asked.len(), 2);
    }

    #[test]
    fn halves_out_of_order_are_refused() {
        let asked = with_server(Fake::default(), |path| {
            let mut client = connect(path);
            assert!(matches!(client.call(&attach()).unwrap(), Reply::Error(_)));
            client.call(&add()).unwrap();
            assert!(matches!(client.call(&add()).unwrap(), Reply::Error(_)));
        });
        assert_eq!(asked, ["add c", "abandon c"]);
    }

    #[test]
    fn bad_frames_end_the_connection_and_nothing_else() {
        let asked = with_server(Fake::default(), |path| {
            let mut stream = Stream::connect(path).unwrap();
            stream.write_all(&[0, 0, 0, 2, b'{', b'}']).unwrap();
            let mut reply = Vec::new();
            stream.read_to_end(&mut reply).unwrap();
            assert!(String::from_utf8_lossy(&reply).contains("not a request"));
            for bad in [&[0xff; 4][..], &[0, 0], &[0, 0, 0, 9, b'x']] {
                let mut stream = Stream::connect(path).unwrap();
                stream.write_all(bad).unwrap();
                stream.shutdown(std::net::Shutdown::Write).unwrap();
                let mut reply = Vec::new();
                stream.read_to_end(&mut reply).unwrap();
                assert!(reply.is_empty());
            }
            let name = "status".to_owned();
            let reply = connect(path).call(&Request::View { name }).unwrap();
            assert!(matches!(reply, Reply::View { document } if document["view"] == "status"));
        });
        assert_eq!(asked, ["view status"]);
    }
}
