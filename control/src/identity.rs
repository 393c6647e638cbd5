//! Identities: a number of 24 bits for a set of labels, agreed between nodes without anyone in
//! the middle.
//!
//! The number travels as the VNI, so all nodes must mean the same by it. A set of labels hashes
//! to a candidate; whoever first makes the file named by that number owns it for the set. A
//! number that others hold is passed by, and the next one is tried. Files appear whole, by
//! link(2), so that every reader sees either none or all of one.
//!
//! Deliberately absent: removing numbers that nobody uses any more. A file's modification time
//! says when a node used it last, for whoever does.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use serde::{Deserialize, Serialize};
use skein_dataplane::ids::IdentityId;

use crate::durable;
use crate::mac::fnv1a64;
use crate::state::{Labels, Namespace, Pod};

/// Labels that would make every pod an identity of its own, or a new one at every roll-out.
/// Peers that a policy selects by them are told apart by their addresses.
pub const LEFT_OUT: &[&str] = &[
    "apps.kubernetes.io/pod-index",
    "batch.kubernetes.io/controller-uid",
    "batch.kubernetes.io/job-completion-index",
    "batch.kubernetes.io/job-name",
    "controller-revision-hash",
    "controller-uid",
    "job-name",
    "pod-template-generation",
    "pod-template-hash",
    "statefulset.kubernetes.io/pod-name",
];

/// How many numbers are tried before giving up.
const MAX_PROBES: u32 = 4096;

/// A number in use is touched again after this long.
const TOUCH_EVERY: Duration = Duration::from_mins(10);

/// The labels that an identity stands for, in canonical form.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct LabelSet(BTreeMap<String, String>);

impl LabelSet {
    /// The set of a pod: its namespace and that namespace's labels, its own labels, its service
    /// account. A namespace that is not known counts as one without labels.
    #[must_use]
    pub fn of_pod(pod: &Pod, namespace: Option<&Namespace>) -> Self {
        let mut set = BTreeMap::new();
        set.insert("namespace".to_owned(), pod.key.namespace.clone());
        set.insert("service-account".to_owned(), pod.service_account.clone());
        let none = Labels::new();
        let namespace = namespace.map_or(&none, |namespace| &namespace.labels);
        for (name, value) in namespace {
            set.insert(format!("namespace-label:{name}"), value.clone());
        }
        for (name, value) in &pod.labels {
            if !LEFT_OUT.contains(&name.as_str()) {
                set.insert(format!("label:{name}"), value.clone());
            }
        }
        Self(set)
    }

    /// Names and values, in order.
    #[must_use]
    pub fn entries(&self) -> &BTreeMap<String, String> {
        &self.0
    }

    /// The namespace.
    #[must_use]
    pub fn namespace(&self) -> &str {
        self.0.get("namespace").map_or("", String::as_str)
    }

    /// The namespace's labels.
    #[must_use]
    pub fn namespace_labels(&self) -> Labels {
        self.behind("namespace-label:")
    }

    /// The pods' labels, but for those that are [`LEFT_OUT`].
    #[must_use]
    pub fn pod_labels(&self) -> Labels {
        self.behind("label:")
    }

    fn behind(&self, kind: &str) -> Labels {
        (self.0.iter())
            .filter_map(|(name, value)| Some((name.strip_prefix(kind)?.to_owned(), value.clone())))
            .collect()
    }

    /// The number that is tried first: FNV-1a over every text with its length before it, so
    /// that no two sets read the same.
    fn candidate(&self) -> u32 {
        let texts = self.0.iter().flat_map(|(name, value)| [name, value]);
        let hash = fnv1a64(texts.flat_map(|text| {
            (text.len() as u64)
                .to_be_bytes()
                .into_iter()
                .chain(text.bytes())
        }));
        let numbers = u64::from(IdentityId::MAX - IdentityId::FIRST_DYNAMIC + 1);
        // The remainder is below 2^24.
        IdentityId::FIRST_DYNAMIC + ((hash ^ (hash >> 32)) % numbers) as u32
    }
}

/// The file of a number.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct IdentityFile {
    api_version: String,
    kind: String,
    metadata: FileMetadata,
    labels: LabelSet,
}

#[derive(Debug, Serialize, Deserialize)]
struct FileMetadata {
    name: String,
}

/// Why a set of labels has no number.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// The folder or a file of it cannot be used.
    #[error("identity file {file}: {source}")]
    Io {
        /// Which.
        file: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The labels do not become a file.
    #[error("labels cannot be written: {0}")]
    Format(String),
    /// All numbers that were tried are held by others.
    #[error("{MAX_PROBES} identities beginning at {first} are all held by other labels")]
    Full {
        /// The first that was tried.
        first: u32,
    },
}

#[derive(Debug)]
struct Held {
    id: IdentityId,
    touched: Instant,
}

/// Finds and makes numbers in a folder that all nodes share.
#[derive(Debug)]
pub struct Allocator {
    folder: PathBuf,
    held: HashMap<LabelSet, Held>,
}

impl Allocator {
    /// Uses `skein.io/identities` in the folder of the cluster's manifests.
    pub fn new(cluster: &Path) -> Result<Self, IdentityError> {
        let folder = cluster.join("skein.io/identities");
        fs::create_dir_all(&folder).map_err(|source| IdentityError::Io {
            file: folder.clone(),
            source,
        })?;
        Ok(Self {
            folder,
            held: HashMap::new(),
        })
    }

    /// The number of a set of labels; made if there is none. `now` decides whether the file is
    /// touched again.
    pub fn allocate(
        &mut self,
        labels: &LabelSet,
        now: Instant,
    ) -> Result<IdentityId, IdentityError> {
        let known = self.held.get(labels).map(|held| (held.id, held.touched));
        let id = match known {
            Some((id, at)) if now.saturating_duration_since(at) < TOUCH_EVERY => return Ok(id),
            Some((id, _)) if touch(&self.file(id)).is_ok() => id,
            // Unknown, or somebody removed the file: agree (anew).
            _ => {
                self.held.remove(labels);
                self.agree(labels)?
            }
        };
        self.held.insert(labels.clone(), Held { id, touched: now });
        Ok(id)
    }

    /// Forgets sets that nobody uses any more, so that their files are not touched.
    pub fn retain(&mut self, in_use: impl Fn(&LabelSet) -> bool) {
        self.held.retain(|labels, _| in_use(labels));
    }

    /// The numbers in use, with their labels.
    pub fn held(&self) -> impl Iterator<Item = (IdentityId, &LabelSet)> {
        self.held.iter().map(|(labels, held)| (held.id, labels))
    }

    fn file(&self, id: IdentityId) -> PathBuf {
        self.folder.join(format!("{}.yaml", id.number()))
    }

    fn agree(&self, labels: &LabelSet) -> Result<IdentityId, IdentityError> {
        let first = labels.candidate();
        let numbers = IdentityId::MAX - IdentityId::FIRST_DYNAMIC + 1;
        for probe in 0..MAX_PROBES {
            let offset = (first - IdentityId::FIRST_DYNAMIC + probe) % numbers;
            let Some(id) = IdentityId::new(IdentityId::FIRST_DYNAMIC + offset) else {
                continue;
            };
            if self.claim(id, labels)? {
                return Ok(id);
            }
        }
        Err(IdentityError::Full { first })
    }

    /// Whether the number stands for these labels, now or from before.
    fn claim(&self, id: IdentityId, labels: &LabelSet) -> Result<bool, IdentityError> {
        let path = self.file(id);
        let fault = |source| IdentityError::Io {
            file: path.clone(),
            source,
        };
        let content = IdentityFile {
            api_version: "skein.io/v1alpha1".into(),
            kind: "Identity".into(),
            metadata: FileMetadata {
                name: id.number().to_string(),
            },
            labels: labels.clone(),
        };
        let text = serde_saphyr::to_string(&content)
            .map_err(|error| IdentityError::Format(error.to_string()))?;
        // A file may be removed between any two steps; then another round decides.
        for _ in 0..8 {
            match fs::read_to_string(&path) {
                Ok(found) => {
                    // A file that cannot be read holds its number all the same.
                    let same = serde_saphyr::from_str::<IdentityFile>(&found)
                        .is_ok_and(|file| file.labels == *labels);
                    if !same {
                        return Ok(false);
                    }
                    match touch(&path) {
                        Ok(()) => return Ok(true),
                        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                        Err(error) => return Err(fault(error)),
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    if durable::create(&path, text.as_bytes()).map_err(fault)? {
                        return Ok(true);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::InvalidData => return Ok(false),
                Err(error) => return Err(fault(error)),
            }
        }
        let busy = io::Error::other("appears and vanishes all the time");
        Err(fault(busy))
    }
}

/// Says that the number is in use.
fn touch(path: &Path) -> io::Result<()> {
    File::options()
        .write(true)
        .open(path)?
        .set_modified(SystemTime::now())
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use proptest::prelude::*;

    use super::*;
    use crate::state::PodKey;

    fn set(entries: &[(&str, &str)]) -> LabelSet {
        let entries = entries.iter();
        LabelSet(
            entries
                .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
                .collect(),
        )
    }

    fn pod(labels: &[(&str, &str)]) -> Pod {
        Pod {
            key: PodKey {
                namespace: "shop".into(),
                name: "web-0".into(),
            },
            labels: set(labels).0,
            service_account: "web".into(),
            ..Pod::default()
        }
    }

    #[test]
    fn a_pod_is_its_labels_and_those_of_its_namespace() {
        let namespace = Namespace {
            name: "shop".into(),
            labels: set(&[("team", "a")]).0,
        };
        let plain = LabelSet::of_pod(&pod(&[("app", "web")]), Some(&namespace));
        let replica = LabelSet::of_pod(
            &pod(&[
                ("app", "web"),
                ("statefulset.kubernetes.io/pod-name", "web-0"),
                ("pod-template-hash", "7d9f"),
            ]),
            Some(&namespace),
        );
        assert_eq!(plain, replica);
        let expected = [
            ("label:app", "web"),
            ("namespace", "shop"),
            ("namespace-label:team", "a"),
            ("service-account", "web"),
        ];
        assert_eq!(plain, set(&expected));
        assert_eq!(plain.namespace(), "shop");
        assert_eq!(plain.namespace_labels(), set(&[("team", "a")]).0);
        assert_eq!(plain.pod_labels(), set(&[("app", "web")]).0);
        assert_ne!(plain, LabelSet::of_pod(&pod(&[("app", "web")]), None));
    }

    #[test]
    fn the_candidate_never_changes_between_versions() {
        // Nodes of different versions must agree: these numbers are part of the format.
        // (Computed apart from this code.)
        assert_eq!(LabelSet::default().candidate(), 11040961);
        let web = set(&[("label:app", "web"), ("namespace", "shop")]);
        assert_eq!(web.candidate(), 13893935);
        assert_ne!(
            set(&[("a", "b"), ("c", "d")]).candidate(),
            set(&[("a", "bc"), ("", "d")]).candidate()
        );
    }

    #[test]
    fn a_number_held_by_others_is_passed_by() {
        let folder = tempfile::tempdir().unwrap();
        let now = Instant::now();
        let labels = set(&[("label:app", "web")]);
        let mut first = Allocator::new(folder.path()).unwrap();
        let candidate = labels.candidate();
        let held = folder
            .path()
            .join(format!("skein.io/identities/{candidate}.yaml"));
        fs::write(&held, "no identity at all: [").unwrap();
        let id = first.allocate(&labels, now).unwrap();
        assert_eq!(id.number(), candidate + 1);
        let mut second = Allocator::new(folder.path()).unwrap();
        assert_eq!(second.allocate(&labels, now).unwrap(), id);
        assert_eq!(second.held().count(), 1);
        second.retain(|_| false);
        assert_eq!(second.held().count(), 0);
    }

    #[test]
    fn a_number_is_touched_before_it_is_used_again_and_remade_when_it_is_gone() {
        let folder = tempfile::tempdir().unwrap();
        let labels = set(&[("label:app", "web")]);
        let mut allocator = Allocator::new(folder.path()).unwrap();
        let now = Instant::now();
        let id = allocator.allocate(&labels, now).unwrap();
        let path = allocator.file(id);
        let old = SystemTime::UNIX_EPOCH;
        File::options()
            .write(true)
            .open(&path)
            .unwrap()
            .set_modified(old)
            .unwrap();
        allocator.allocate(&labels, now).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().modified().unwrap(), old);
        allocator.allocate(&labels, now + TOUCH_EVERY).unwrap();
        assert_ne!(fs::metadata(&path).unwrap().modified().unwrap(), old);
        fs::remove_file(&path).unwrap();
        assert_eq!(
            allocator.allocate(&labels, now + 2 * TOUCH_EVERY).unwrap(),
            id
        );
        assert!(path.exists());
    }

    #[test]
    fn labels_of_every_kind_come_back_from_their_file() {
        let folder = tempfile::tempdir().unwrap();
        let labels = set(&[
            ("label:n", "1"),
            ("label:b", "true"),
            ("label:e", ""),
            ("label:d", "2024-01-01"),
            ("label:t", "~"),
            ("label:x", "0x10"),
        ]);
        let now = Instant::now();
        let id = Allocator::new(folder.path())
            .unwrap()
            .allocate(&labels, now)
            .unwrap();
        let again = Allocator::new(folder.path())
            .unwrap()
            .allocate(&labels, now)
            .unwrap();
        assert_eq!(again, id);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        /// Two nodes that meet the same sets in different orders at the same time agree on all,
        /// and no two sets share a number, also where candidates collide.
        #[test]
        fn racing_allocators_agree(
            seeds in prop::collection::btree_set(0u8..40, 1..24),
            blocked in 0u32..3,
        ) {
            let folder = tempfile::tempdir().unwrap();
            let sets: Vec<_> = seeds.iter().map(|s| set(&[("label:app", &s.to_string())])).collect();
            // Make candidates collide: some are taken by files that hold other labels.
            let identities = folder.path().join("skein.io/identities");
            fs::create_dir_all(&identities).unwrap();
            for labels in &sets {
                for n in 0..blocked {
                    fs::write(identities.join(format!("{}.yaml", labels.candidate() + n)), "x").unwrap();
                }
            }
            let barrier = Barrier::new(2);
            let run = |reverse: bool| {
                let mut order: Vec<_> = sets.iter().collect();
                if reverse { order.reverse(); }
                let mut allocator = Allocator::new(folder.path()).unwrap();
                barrier.wait();
                order.into_iter()
                    .map(|labels| (labels.clone(), allocator.allocate(labels, Instant::now()).unwrap()))
                    .collect::<BTreeMap<_, _>>()
            };
            let (first, second) = std::thread::scope(|scope| {
                let other = scope.spawn(|| run(true));
                (run(false), other.join().unwrap())
            });
            prop_assert_eq!(&first, &second);
            let numbers: std::collections::BTreeSet<_> = first.values().collect();
            prop_assert_eq!(numbers.len(), first.len());
        }
    }
}
