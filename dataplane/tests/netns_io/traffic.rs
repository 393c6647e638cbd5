//! Traffic between two pods, checked at both ends.

use std::hash::{DefaultHasher, Hasher};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::mpsc;
use std::time::Duration;

use crate::lab::Pod;

const PATIENCE: Duration = Duration::from_secs(20);

/// Sends `bytes` bytes of a pattern over TCP; both ends must agree on their hash.
pub fn tcp(client: &Pod<'_>, server: &Pod<'_>, bytes: usize) {
    let (port_tx, port_rx) = mpsc::channel();
    let received = server.inside(move || {
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
        port_tx.send(listener.local_addr().unwrap().port()).unwrap();
        let (mut stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut hasher = DefaultHasher::new();
        let (mut buffer, mut count) = (vec![0; 1 << 16], 0);
        loop {
            let now = stream.read(&mut buffer).unwrap();
            if now == 0 {
                break (count, hasher.finish());
            }
            count += now;
            hasher.write(&buffer[..now]);
        }
    });
    let port = port_rx.recv_timeout(PATIENCE).unwrap();
    let target = SocketAddr::from((server.address, port));
    let sent = client.inside(move || {
        let mut stream = TcpStream::connect_timeout(&target, PATIENCE).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        let mut hasher = DefaultHasher::new();
        let (mut left, mut state) = (bytes, 1u64);
        while left > 0 {
            let mut chunk = [0; 8192];
            for word in chunk.chunks_mut(8) {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                word.copy_from_slice(&state.to_le_bytes());
            }
            let now = left.min(chunk.len());
            stream.write_all(&chunk[..now]).unwrap();
            hasher.write(&chunk[..now]);
            left -= now;
        }
        stream.shutdown(Shutdown::Write).unwrap();
        (bytes, hasher.finish())
    });
    let sent = sent.join().expect("the TCP client");
    assert_eq!(received.join().expect("the TCP server"), sent);
}

/// Sends datagrams that are echoed; a lost one is sent again a few times.
pub fn udp(client: &Pod<'_>, server: &Pod<'_>, len: usize) {
    const DATAGRAMS: u8 = 50;
    let (port_tx, port_rx) = mpsc::channel();
    let (done_tx, done_rx) = mpsc::channel::<()>();
    let echo = server.inside(move || {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
        socket
            .set_read_timeout(Some(Duration::from_millis(100)))
            .unwrap();
        port_tx.send(socket.local_addr().unwrap().port()).unwrap();
        let mut buffer = vec![0; 1 << 16];
        while done_rx.try_recv() == Err(mpsc::TryRecvError::Empty) {
            if let Ok((len, from)) = socket.recv_from(&mut buffer) {
                socket.send_to(&buffer[..len], from).unwrap();
            }
        }
    });
    let port = port_rx.recv_timeout(PATIENCE).unwrap();
    let target = (server.address, port);
    let asked = client.inside(move || {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
        socket.connect(target).unwrap();
        socket
            .set_read_timeout(Some(Duration::from_secs(1)))
            .unwrap();
        let mut buffer = vec![0; 1 << 16];
        for number in 0..DATAGRAMS {
            let payload = vec![number; len];
            let answered = (0..10).any(|_| {
                socket.send(&payload).unwrap();
                matches!(socket.recv(&mut buffer), Ok(now) if buffer[..now] == payload)
            });
            assert!(answered, "datagram {number} of {len} bytes had no answer");
        }
    });
    let asked = asked.join();
    drop(done_tx);
    echo.join().expect("the UDP server");
    asked.expect("the UDP client");
}

/// Pings, with the answer to each.
pub fn ping(client: &Pod<'_>, target: &str, payload: usize) {
    client.run(&format!(
        "ping -n -c 3 -i 0.05 -W 5 -M do -s {payload} {target}"
    ));
}
