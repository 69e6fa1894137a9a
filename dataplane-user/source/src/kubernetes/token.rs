//! The token of a file, in the form of a request's header.

use std::{
    fs,
    path::PathBuf,
    sync::Mutex,
    time::{Duration, Instant},
};

use http::HeaderValue;

use super::error::ConnectError;

/// Time for which a token is used before its file is read again. The kubelet writes a new token long before the old one
/// expires.
const FRESH: Duration = Duration::from_mins(1);

/// A file with a token. White space around the token, such as a trailing line break, is ignored.
#[derive(Debug)]
pub struct TokenFile {
    path: PathBuf,
    last: Mutex<Option<(Instant, HeaderValue)>>,
}

impl TokenFile {
    /// Returns the file at this path. It is read when the token is needed.
    pub fn new(path: PathBuf) -> Self {
        Self {
            path,
            last: Mutex::default(),
        }
    }

    /// Returns the value of the header `Authorization`.
    ///
    /// # Errors
    ///
    /// If the file has no token, and none was read before.
    pub fn header(&self) -> Result<HeaderValue, ConnectError> {
        let mut last = self
            .last
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some((at, header)) = &*last
            && at.elapsed() < FRESH
        {
            return Ok(header.clone());
        }
        let header = match (self.read(), &*last) {
            (Ok(header), _) => header,
            // Some programs remove the file after the first read.
            (Err(_), Some((_, header))) => header.clone(),
            (Err(text), None) => {
                return Err(ConnectError::Token {
                    path: self.path.clone(),
                    text,
                });
            }
        };
        *last = Some((Instant::now(), header.clone()));
        Ok(header)
    }

    fn read(&self) -> Result<HeaderValue, String> {
        let text = fs::read_to_string(&self.path).map_err(|error| error.to_string())?;
        let token = text.trim();
        if token.is_empty() {
            return Err("it is empty".to_owned());
        }
        let mut header = HeaderValue::from_str(&format!("Bearer {token}"))
            .map_err(|_| "it has characters that a header cannot carry".to_owned())?;
        header.set_sensitive(true);
        Ok(header)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn white_space_is_no_part_of_a_token() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("token");
        let file = TokenFile::new(path.clone());
        let missing = file.header().unwrap_err().to_string();
        assert!(missing.contains("token"), "{missing}");
        for (text, wanted) in [
            ("\n", Err("it is empty")),
            (" a\nb \n", Err("it has")),
            ("abc\r\n", Ok("Bearer abc")),
        ] {
            fs::write(&path, text).unwrap();
            match (file.header(), wanted) {
                (Ok(header), Ok(wanted)) => assert_eq!(header, wanted),
                (Err(error), Err(wanted)) => assert!(error.to_string().contains(wanted), "{error}"),
                (got, wanted) => panic!("{got:?}, not {wanted:?}"),
            }
        }
        // After the first read, the token stays in use.
        fs::remove_file(&path).unwrap();
        assert_eq!(file.header().unwrap(), "Bearer abc");
    }
}
