//! Raw configuration values: from the file with their line, from the environment by name.
//!
//! A reader hands each key out once, typed. What nobody took is an unknown key. Faults are
//! collected, not returned one by one, so that one run names them all.

use std::collections::BTreeMap;
use std::fmt::{self, Display};
use std::str::FromStr;

use toml::de::{DeTable, DeValue};

/// A fault of the configuration: which key, where it was set, and what is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// `section.key`; empty for the file as a whole.
    pub key: String,
    /// `line 3`, the environment variable, or empty for a default.
    pub place: String,
    /// What is wrong and what would be right.
    pub message: String,
}

impl Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let separator = |text: &str| if text.is_empty() { "" } else { ": " };
        write!(
            f,
            "{}{}{}{}{}",
            self.place,
            separator(&self.place),
            self.key,
            separator(&self.key),
            self.message
        )
    }
}

/// A value before its key gives it a type.
#[derive(Clone, Debug, PartialEq)]
enum Raw {
    Text(String),
    Integer(i128),
    Boolean(bool),
    List(Vec<Raw>),
    Other(&'static str),
}

impl Raw {
    fn from_toml(value: &DeValue<'_>) -> Self {
        match value {
            DeValue::String(text) => Self::Text(text.to_string()),
            DeValue::Integer(integer) => {
                i128::from_str_radix(&integer.as_str().replace('_', ""), integer.radix())
                    .map_or(Self::Other("a number out of range"), Self::Integer)
            }
            DeValue::Boolean(boolean) => Self::Boolean(*boolean),
            DeValue::Array(items) => Self::List(
                items
                    .iter()
                    .map(|item| Self::from_toml(item.get_ref()))
                    .collect(),
            ),
            DeValue::Float(_) => Self::Other("a number with a fraction"),
            DeValue::Datetime(_) => Self::Other("a date"),
            DeValue::Table(_) => Self::Other("a table"),
        }
    }

    fn kind(&self) -> &'static str {
        match self {
            Self::Text(_) => "a string",
            Self::Integer(_) => "a whole number",
            Self::Boolean(_) => "true or false",
            Self::List(_) => "a list",
            Self::Other(kind) => kind,
        }
    }
}

/// Looks an environment variable up.
pub type Environment<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Hands typed values out and collects faults.
pub struct Reader<'a> {
    file: BTreeMap<String, (Raw, String)>,
    environment: Environment<'a>,
    faults: Vec<Fault>,
    places: BTreeMap<String, String>,
}

impl<'a> Reader<'a> {
    /// Reads the file's text; a text that is no TOML is a fault, and all keys have defaults.
    pub fn new(text: &str, environment: Environment<'a>) -> Self {
        let mut reader = Self {
            file: BTreeMap::new(),
            environment,
            faults: Vec::new(),
            places: BTreeMap::new(),
        };
        let line = |offset: usize| {
            let before = text.as_bytes().get(..offset).unwrap_or_default();
            format!(
                "line {}",
                before.iter().filter(|&&b| b == b'\n').count() + 1
            )
        };
        let table = match DeTable::parse(text) {
            Ok(table) => table,
            Err(error) => {
                let place = error
                    .span()
                    .map(|span| line(span.start))
                    .unwrap_or_default();
                reader.fault("", place, error.message());
                return reader;
            }
        };
        for (section, value) in table.get_ref() {
            let section_name = section.get_ref();
            let DeValue::Table(keys) = value.get_ref() else {
                let message = "unknown key; every key belongs to a [section]";
                reader.fault(section_name, line(section.span().start), message);
                continue;
            };
            for (key, value) in keys {
                reader.file.insert(
                    format!("{section_name}.{}", key.get_ref()),
                    (Raw::from_toml(value.get_ref()), line(key.span().start)),
                );
            }
            if keys.is_empty() {
                // So that an unknown section is noticed even when it is empty.
                reader
                    .places
                    .insert(format!("{section_name}."), line(section.span().start));
            }
        }
        reader
    }

    fn fault(&mut self, key: &str, place: String, message: impl Into<String>) {
        self.faults.push(Fault {
            key: key.to_owned(),
            place,
            message: message.into(),
        });
    }

    /// Adds a fault of a key that has been read.
    pub fn refuse(&mut self, key: &str, message: impl Into<String>) {
        let place = self.places.get(key).cloned().unwrap_or_default();
        self.fault(key, place, message);
    }

    /// The value of a key; the environment wins over the file.
    fn take(&mut self, key: &str) -> Option<(Raw, bool)> {
        let variable = variable_of(key);
        let in_file = self.file.remove(key);
        self.places.insert(key.to_owned(), String::new());
        if let Some(text) = (self.environment)(&variable) {
            self.places.insert(key.to_owned(), variable);
            return Some((Raw::Text(text), true));
        }
        let (raw, place) = in_file?;
        self.places.insert(key.to_owned(), place);
        Some((raw, false))
    }

    fn mismatch(&mut self, key: &str, expected: &str, found: &Raw) {
        let message = match found {
            Raw::Text(text) => format!("'{text}' is not {expected}"),
            other => format!("this is {}; it takes {expected}", other.kind()),
        };
        self.refuse(key, message);
    }

    /// A string.
    pub fn text(&mut self, key: &str, default: &str) -> String {
        match self.take(key) {
            None => default.to_owned(),
            Some((Raw::Text(text), _)) => text,
            Some((other, _)) => {
                self.mismatch(key, "a string", &other);
                default.to_owned()
            }
        }
    }

    /// A string of a form.
    pub fn parsed<T: FromStr>(&mut self, key: &str, default: &str, form: &str) -> Option<T> {
        let text = self.text(key, default);
        match text.parse() {
            Ok(value) => Some(value),
            Err(_) => {
                self.refuse(key, format!("'{text}' is not {form}"));
                None
            }
        }
    }

    /// One of a few words; the first is the default.
    pub fn choice<T: Copy>(&mut self, key: &str, choices: &[(&str, T)]) -> T {
        let text = self.text(key, choices[0].0);
        if let Some((_, value)) = choices.iter().find(|(word, _)| *word == text) {
            return *value;
        }
        let words: Vec<_> = choices.iter().map(|(word, _)| *word).collect();
        self.refuse(key, format!("'{text}' is not one of: {}", words.join(", ")));
        choices[0].1
    }

    /// True or false.
    pub fn boolean(&mut self, key: &str, default: bool) -> bool {
        match self.take(key) {
            None => default,
            Some((Raw::Boolean(value), _)) => value,
            Some((Raw::Text(text), true)) if text == "true" => true,
            Some((Raw::Text(text), true)) if text == "false" => false,
            Some((other, _)) => {
                self.mismatch(key, "true or false", &other);
                default
            }
        }
    }

    /// A whole number within limits, or zero where zero means "found by itself".
    pub fn number(&mut self, key: &str, default: u32, limits: (u32, u32), zero: bool) -> u32 {
        let Some((raw, from_environment)) = self.take(key) else {
            return default;
        };
        let expected = format!(
            "a whole number from {} to {}{}",
            limits.0,
            limits.1,
            if zero { ", or 0 for the default" } else { "" }
        );
        let Some(number) = integer(&raw, from_environment) else {
            self.mismatch(key, &expected, &raw);
            return default;
        };
        match u32::try_from(number) {
            Ok(0) if zero => 0,
            Ok(number) if (limits.0..=limits.1).contains(&number) => number,
            _ => {
                self.refuse(key, format!("{number} is not {expected}"));
                default
            }
        }
    }

    /// A list, each item by `item`; in the environment separated by commas.
    pub fn list<T>(
        &mut self,
        key: &str,
        form: &str,
        item: impl Fn(&str) -> Result<T, String>,
    ) -> Vec<T> {
        let items = match self.take(key) {
            None => return Vec::new(),
            Some((Raw::Text(text), true)) => text
                .split(',')
                .map(str::trim)
                .filter(|part| !part.is_empty())
                .map(|part| Raw::Text(part.to_owned()))
                .collect(),
            Some((Raw::List(items), _)) => items,
            Some((other, _)) => {
                self.mismatch(key, &format!("a list of {form}s"), &other);
                return Vec::new();
            }
        };
        let mut values = Vec::new();
        for raw in items {
            let text = match &raw {
                Raw::Text(text) => text.clone(),
                Raw::Integer(number) => number.to_string(),
                other => {
                    self.mismatch(key, &format!("a list of {form}s"), other);
                    continue;
                }
            };
            match item(&text) {
                Ok(value) => values.push(value),
                Err(message) => self.refuse(key, message),
            }
        }
        values
    }

    /// The faults; keys that nobody took are among them.
    pub fn finish(mut self) -> Vec<Fault> {
        let known: Vec<String> = self.places.keys().cloned().collect();
        for (key, (_, place)) in std::mem::take(&mut self.file) {
            let section = key.split('.').next().unwrap_or_default();
            let neighbours: Vec<_> = known
                .iter()
                .filter_map(|known| known.strip_prefix(section)?.strip_prefix('.'))
                .filter(|name| !name.is_empty())
                .collect();
            let message = if neighbours.is_empty() {
                format!("unknown section [{section}]")
            } else {
                format!("unknown key; [{section}] has: {}", neighbours.join(", "))
            };
            self.fault(&key, place, message);
        }
        let empty: Vec<_> = (self.places.iter())
            .filter(|(key, _)| key.ends_with('.'))
            .map(|(key, place)| (key.clone(), place.clone()))
            .collect();
        for (section, place) in empty {
            if !known
                .iter()
                .any(|key| key.len() > section.len() && key.starts_with(&section))
            {
                let name = section.trim_end_matches('.').to_owned();
                self.fault("", place, format!("unknown section [{name}]"));
            }
        }
        self.faults
    }
}

fn integer(raw: &Raw, from_environment: bool) -> Option<i128> {
    match raw {
        Raw::Integer(number) => Some(*number),
        Raw::Text(text) if from_environment => text.trim().parse().ok(),
        _ => None,
    }
}

/// The environment variable of a key: `uplink.xdp_mode` is `SKEIN_UPLINK_XDP_MODE`.
#[must_use]
pub fn variable_of(key: &str) -> String {
    format!("SKEIN_{}", key.replace('.', "_").to_uppercase())
}
