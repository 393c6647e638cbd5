//! Keys and certificates of a cluster, and the kubeconfigs that carry them.
//!
//! One authority signs all of them: the API server's certificate, and a client's for each
//! component, whose subject says who it is (common name) and in which groups (organisation).
//! They live as long as the cluster's folder does.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::json;

use crate::cmd::Cmd;
use crate::state;

const CURVE: &str = "ec_paramgen_curve:P-256";

/// The folder with the authority and what it signed.
#[derive(Clone, Debug)]
pub struct Pki {
    folder: PathBuf,
}

impl Pki {
    /// Makes the authority and the pair that signs service account tokens.
    ///
    /// # Errors
    /// openssl's, and the files'.
    pub fn create(folder: PathBuf) -> Result<Self> {
        std::fs::create_dir_all(&folder)
            .with_context(|| format!("cannot make {}", folder.display()))?;
        let pki = Self { folder };
        // In place of the system's own, which adds extensions by itself.
        std::fs::write(
            pki.folder.join("openssl.cnf"),
            "[req]\ndistinguished_name=dn\n[dn]\n",
        )?;
        pki.request("/CN=skein-lab")
            .args(["-addext", "basicConstraints=critical,CA:TRUE"])
            .args(["-addext", "keyUsage=critical,keyCertSign,digitalSignature"])
            .args(["-addext", "subjectKeyIdentifier=hash"])
            .arg("-keyout")
            .arg(pki.key("ca"))
            .arg("-out")
            .arg(pki.certificate("ca"))
            .run()?;
        openssl("genpkey -algorithm ec -pkeyopt")
            .arg(CURVE)
            .arg("-out")
            .arg(pki.key("service-accounts"))
            .run()?;
        openssl("pkey -pubout -in")
            .arg(pki.key("service-accounts"))
            .arg("-out")
            .arg(pki.certificate("service-accounts"))
            .run()?;
        Ok(pki)
    }

    /// A certificate for a server with these names and addresses.
    ///
    /// # Errors
    /// openssl's.
    pub fn server(&self, name: &str, hosts: &[&str], addresses: &[IpAddr]) -> Result<()> {
        let hosts = hosts.iter().map(|host| format!("DNS:{host}"));
        let addresses = addresses.iter().map(|address| format!("IP:{address}"));
        let names: Vec<String> = hosts.chain(addresses).collect();
        let names = format!("subjectAltName={}", names.join(","));
        self.sign(name, &format!("/CN={name}"), &["serverAuth", &names])
    }

    /// A certificate for a client of the API server, and its kubeconfig.
    ///
    /// # Errors
    /// openssl's, and the file's.
    pub fn client(&self, name: &str, user: &str, group: &str, server: &str) -> Result<PathBuf> {
        let subject = match group {
            "" => format!("/CN={user}"),
            group => format!("/O={group}/CN={user}"),
        };
        self.sign(name, &subject, &["clientAuth"])?;
        let path = self.folder.join(format!("{name}.kubeconfig"));
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{
                "name": "lab",
                "cluster": {"server": server, "certificate-authority": self.certificate("ca")},
            }],
            "users": [{
                "name": name,
                "user": {
                    "client-certificate": self.certificate(name),
                    "client-key": self.key(name),
                },
            }],
            "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": name}}],
            "current-context": "lab",
        });
        state::write_json(&path, &config)?;
        Ok(path)
    }

    /// Makes a key and signs its certificate; `uses` is the extended key usage, then further
    /// extensions.
    fn sign(&self, name: &str, subject: &str, uses: &[&str]) -> Result<()> {
        let mut command = self
            .request(subject)
            .args(["-addext", "basicConstraints=critical,CA:FALSE"])
            .args(["-addext", &format!("extendedKeyUsage={}", uses[0])]);
        for extension in &uses[1..] {
            command = command.args(["-addext", extension]);
        }
        command
            .arg("-CA")
            .arg(self.certificate("ca"))
            .arg("-CAkey")
            .arg(self.key("ca"))
            .arg("-keyout")
            .arg(self.key(name))
            .arg("-out")
            .arg(self.certificate(name))
            .run()
            .map(drop)
    }

    /// The common part of both: a new key, and a certificate for it.
    fn request(&self, subject: &str) -> Cmd {
        openssl("req -x509 -nodes -days 365 -newkey ec -pkeyopt")
            .args([CURVE, "-subj", subject, "-config"])
            .arg(self.folder.join("openssl.cnf"))
    }

    /// A private key's path.
    pub fn key(&self, name: &str) -> PathBuf {
        self.folder.join(format!("{name}.key"))
    }

    /// A certificate's path; for the service accounts' pair, the public key's.
    pub fn certificate(&self, name: &str) -> PathBuf {
        self.folder.join(format!("{name}.crt"))
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }
}

fn openssl(arguments: &str) -> Cmd {
    Cmd::line(&format!("openssl {arguments}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_authority_signs_verifies_and_says_who_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let pki = Pki::create(folder.path().join("pki")).unwrap();
        let address = IpAddr::from([192, 168, 77, 3]);
        pki.server("apiserver", &["kubernetes"], &[address])
            .unwrap();
        let server = "https://192.168.77.3:6443";
        let config = pki
            .client("admin", "lab-admin", "system:masters", server)
            .unwrap();
        for (name, purpose) in [("apiserver", "sslserver"), ("admin", "sslclient")] {
            openssl("verify -purpose")
                .args([purpose, "-CAfile"])
                .arg(pki.certificate("ca"))
                .arg(pki.certificate(name))
                .run()
                .unwrap();
        }
        let text = openssl("x509 -noout -subject -ext subjectAltName -in")
            .arg(pki.certificate("apiserver"))
            .run()
            .unwrap()
            .stdout;
        assert!(
            text.contains("192.168.77.3") && text.contains("DNS:kubernetes"),
            "{text}"
        );
        let config: serde_json::Value = state::read_json(&config).unwrap();
        assert_eq!(config["clusters"][0]["cluster"]["server"], server);
    }
}
