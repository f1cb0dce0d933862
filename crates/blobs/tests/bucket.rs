//! Requests to a bucket over HTTP, for objects of one part and of several.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic, as tests do")]

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::{Query, Request, State},
    http::{HeaderMap, Method, StatusCode},
    response::{IntoResponse as _, Response},
};
use futures::TryStreamExt as _;
use relay_blobs::{BlobConfig, BlobKey, Blobs, S3Config};

#[derive(Default)]
struct Bucket {
    objects: BTreeMap<String, Vec<u8>>,
    parts: BTreeMap<u32, Vec<u8>>,
    unsigned: usize,
}

/// As much of the protocol as an upload, a download and a removal need.
async fn serve(State(bucket): State<Arc<Mutex<Bucket>>>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let Query(query) = Query::<BTreeMap<String, String>>::try_from_uri(&parts.uri).unwrap();
    let body: Bytes = axum::body::to_bytes(body, usize::MAX).await.unwrap();
    let mut bucket = bucket.lock().unwrap();
    bucket.unsigned += usize::from(!is_signed(&parts.headers));
    let path = parts.uri.path().to_owned();
    let tagged = || ([("etag", "\"tag\"")], ()).into_response();
    match (parts.method, query.get("partNumber")) {
        (Method::PUT, Some(number)) => {
            bucket.parts.insert(number.parse().unwrap(), body.to_vec());
            tagged()
        }
        (Method::PUT, None) => {
            bucket.objects.insert(path, body.to_vec());
            tagged()
        }
        (Method::POST, _) if query.contains_key("uploads") => {
            let xml = "<InitiateMultipartUploadResult><UploadId>one</UploadId></InitiateMultipartUploadResult>";
            xml.into_response()
        }
        (Method::POST, _) if query.contains_key("uploadId") => {
            let whole = std::mem::take(&mut bucket.parts).into_values().flatten().collect();
            bucket.objects.insert(path, whole);
            "<CompleteMultipartUploadResult><ETag>tag</ETag></CompleteMultipartUploadResult>".into_response()
        }
        (Method::POST, _) if query.contains_key("delete") => {
            let list = String::from_utf8(body.to_vec()).unwrap();
            let mut deleted = String::new();
            for (key, _) in list.split("<Key>").skip(1).filter_map(|rest| rest.split_once("</Key>")) {
                bucket.objects.remove(&format!("{path}/{key}"));
                deleted += &format!("<Deleted><Key>{key}</Key></Deleted>");
            }
            format!("<DeleteResult>{deleted}</DeleteResult>").into_response()
        }
        (Method::GET, _) => match bucket.objects.get(&path) {
            Some(bytes) => {
                let headers = [("etag", "\"tag\""), ("last-modified", "Sun, 01 Mar 2026 12:00:00 GMT")];
                (headers, Body::from(bytes.clone())).into_response()
            }
            None => StatusCode::NOT_FOUND.into_response(),
        },
        (Method::DELETE, _) => {
            bucket.objects.remove(&path);
            bucket.parts.clear();
            StatusCode::NO_CONTENT.into_response()
        }
        _ => StatusCode::METHOD_NOT_ALLOWED.into_response(),
    }
}

fn is_signed(headers: &HeaderMap) -> bool {
    headers
        .get("authorization")
        .is_some_and(|value| value.to_str().is_ok_and(|text| text.contains("Credential=key-id/")))
}

async fn bucket() -> (Arc<Mutex<Bucket>>, Blobs) {
    let bucket = Arc::new(Mutex::new(Bucket::default()));
    let router = Router::new().fallback(serve).with_state(Arc::clone(&bucket));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, router).await });
    let config = S3Config {
        bucket: "files".to_owned(),
        endpoint: Some(endpoint),
        region: Some("here".to_owned()),
        access_key_id: Some("key-id".to_owned()),
        secret_access_key: Some("key".to_owned()),
    };
    (bucket, Blobs::new(BlobConfig::S3(config)))
}

async fn write(blobs: &Blobs, key: BlobKey, pieces: &[Vec<u8>]) {
    let mut upload = blobs.upload(key).await.unwrap();
    for piece in pieces {
        upload.push(piece.clone().into()).await.unwrap();
    }
    upload.finish().await.unwrap();
}

async fn read(blobs: &Blobs, key: BlobKey) -> Option<Vec<u8>> {
    let pieces: Vec<Bytes> = blobs.read(key).await.unwrap()?.try_collect().await.unwrap();
    Some(pieces.concat())
}

#[tokio::test]
async fn objects_of_one_and_several_parts_are_read_back_unchanged() {
    let (bucket, blobs) = bucket().await;
    let small = BlobKey { workspace: 1, file: 2, object: 3 };
    write(&blobs, small, &[b"hello ".to_vec(), b"world".to_vec()]).await;
    assert_eq!(read(&blobs, small).await.as_deref(), Some(&b"hello world"[..]));
    assert_eq!(bucket.lock().unwrap().objects.keys().collect::<Vec<_>>(), ["/files/1/2/3"], "ids make the name");

    let large = BlobKey { object: 4, ..small };
    let pieces: Vec<Vec<u8>> = (0..13).map(|n| vec![n; 1 << 20]).collect();
    write(&blobs, large, &pieces).await;
    assert!(read(&blobs, large).await == Some(pieces.concat()));

    for key in [small, large, small] {
        blobs.delete(key).await.unwrap();
    }
    assert_eq!(read(&blobs, small).await, None);
    let bucket = bucket.lock().unwrap();
    assert!(bucket.objects.is_empty());
    assert_eq!(bucket.unsigned, 0, "every request was signed");
}

#[tokio::test]
async fn an_unavailable_bucket_is_an_error_and_not_an_absent_object() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        let away = || async { StatusCode::FORBIDDEN };
        axum::serve(listener, Router::new().fallback(away)).await
    });
    let config = S3Config {
        bucket: "files".to_owned(),
        endpoint: Some(endpoint),
        region: Some("here".to_owned()),
        access_key_id: Some("a".to_owned()),
        secret_access_key: Some("b".to_owned()),
    };
    let blobs = Blobs::new(BlobConfig::S3(config));
    assert!(blobs.read(BlobKey { workspace: 1, file: 2, object: 3 }).await.is_err());
}
