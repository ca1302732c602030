//! Steering: the fields `steer`, `layers` and `positions`, and the named vectors at `/v1/vectors`.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use axum::body::Body;
use axum::extract::{Path, State};
use axum::{Extension, Json};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Map, Value, json};

use super::App;
use super::body::understand;
use super::error::ApiError;
use super::fields::RequestFields;
use super::front::Caller;
use crate::engine::{EngineInfo, Layers, Positions, Steer, Tenant};
use crate::forward::tap::{MAX_STEERS, check_vector};
use crate::text::model::TextModel;

type Result<T> = std::result::Result<T, ApiError>;

/// Maximum named vectors of a key, and bytes of a name.
const MAX_VECTORS: usize = 256;
const MAX_NAME_BYTES: usize = 64;
/// Maximum elements of all keys' vectors. With many keys, each key has fewer vectors.
const MAX_NUMBERS: usize = 64 << 20;

/// Vectors of one tenant, by name.
type NamedVectors = BTreeMap<String, Arc<[f32]>>;

/// The named vectors of each key.
pub(super) struct Vectors {
    tenants: usize,
    names: Mutex<BTreeMap<Tenant, NamedVectors>>,
}

impl Vectors {
    /// For `keys` keys. Without keys, all clients share the vectors.
    pub(super) fn of(keys: usize) -> Self {
        Self { tenants: keys.max(1), names: Mutex::default() }
    }

    /// Calls `what` with the vectors of `tenant`.
    fn with<T>(&self, tenant: Tenant, what: impl FnOnce(&mut NamedVectors) -> T) -> T {
        what(self.names.lock().unwrap_or_else(PoisonError::into_inner).entry(tenant).or_default())
    }

    fn get(&self, tenant: Tenant, name: &str) -> Option<Arc<[f32]>> {
        self.with(tenant, |names| names.get(name).cloned())
    }

    /// Stores `vector` as `tenant`'s vector `name`. Errors: `tenant` has too many vectors.
    fn put(&self, tenant: Tenant, name: String, vector: Arc<[f32]>) -> Result<()> {
        let share = (MAX_NUMBERS / vector.len().max(1) / self.tenants).clamp(1, MAX_VECTORS);
        self.with(tenant, |names| {
            if names.len() >= share && !names.contains_key(&name) {
                return Err(ApiError::too_many(format!("{share} vectors is the maximum: delete one first")));
            }
            names.insert(name, vector);
            Ok(())
        })
    }

    /// Looks up the names in `steering`. Errors: a vector does not exist.
    pub(super) fn resolve(&self, tenant: Tenant, steering: &[SteerField]) -> Result<Vec<Steer>> {
        let one = |SteerField { layer, vector, coefficient, positions }: &SteerField| {
            let vector = match vector {
                SteerVector::Given(vector) => vector.clone(),
                SteerVector::Named(name) => self.get(tenant, name).ok_or_else(|| {
                    ApiError::bad_field(
                        "steer",
                        format!("There is no vector '{name}': put one at /v1/vectors/{name} first"),
                    )
                })?,
            };
            Ok(Steer { layer: *layer, vector, coefficient: *coefficient, positions: positions.clone() })
        };
        steering.iter().map(one).collect()
    }
}

/// One entry of the field `steer`.
#[derive(Clone)]
pub(super) struct SteerField {
    layer: usize,
    vector: SteerVector,
    coefficient: f32,
    positions: Positions,
}

#[derive(Clone)]
enum SteerVector {
    Given(Arc<[f32]>),
    Named(String),
}

/// Reads `steer`: `[{"layer": 12, "vector": [..] or "name", "coefficient": 4.0, "positions": "all"}]`.
pub(super) fn read_steer(model: &TextModel, fields: &mut RequestFields) -> Result<Vec<SteerField>> {
    let wrong = |message: String| ApiError::bad_field("steer", message);
    let list = match fields.take("steer") {
        None => return Ok(Vec::new()),
        Some(Value::Array(list)) if list.len() <= MAX_STEERS => list,
        Some(_) => return Err(wrong(format!("'steer' must be a list of at most {MAX_STEERS} objects"))),
    };
    let info = model.engine().info();
    let one = |entry: Value| {
        let Value::Object(entry) = entry else { return Err(wrong("An entry of 'steer' must be an object".into())) };
        let mut entry = RequestFields::from(entry);
        let missing = |name: &str| wrong(format!("An entry of 'steer' has no '{name}'"));
        let layer = entry.integer("layer", 0)?.ok_or_else(|| missing("layer"))?;
        let vector = match entry.take("vector").ok_or_else(|| missing("vector"))? {
            Value::String(name) => SteerVector::Named(name),
            list => SteerVector::Given(numbers("vector", &list)?),
        };
        let coefficient = entry.number("coefficient", f64::from(f32::MIN)..=f64::from(f32::MAX))?.unwrap_or(1.0);
        let positions = read_positions(&mut entry)?;
        entry.finish()?;
        let steering = SteerField { layer, vector, coefficient, positions };
        steering.check(info).map_err(|e| ApiError::of_field("steer", e))?;
        Ok(steering)
    };
    list.into_iter().map(one).collect()
}

impl SteerField {
    /// Checks what is known before names are looked up.
    fn check(&self, info: &EngineInfo) -> crate::Result<()> {
        let vector = match &self.vector {
            SteerVector::Given(vector) => vector.clone(),
            SteerVector::Named(_) => vec![0.0; info.hidden_size].into(),
        };
        Steer { layer: self.layer, vector, coefficient: self.coefficient, positions: self.positions.clone() }
            .check(info.layers, info.stream_shape())
    }
}

/// Reads `positions`: `"all"`, `"prompt"`, `"generated"`, or ranges `[[0, 5], [9, null]]` whose ends are not included.
pub(super) fn read_positions(fields: &mut RequestFields) -> Result<Positions> {
    let wrong = || {
        let message = "'positions' must be \"all\", \"prompt\", \"generated\", or a list of ranges [start, end] (end \
                       excluded, null: to the last position)";
        ApiError::bad_field("positions", message)
    };
    let range = |range: &Value| -> Option<Range<usize>> {
        let [start, end] = range.as_array()?.as_slice() else { return None };
        let end = if end.is_null() { Some(usize::MAX) } else { end.as_u64().map(|end| end as usize) };
        Some(start.as_u64()? as usize..end?)
    };
    let positions = match fields.take("positions") {
        None => Positions::All,
        Some(Value::Array(list)) => Positions::Some(list.iter().map(range).collect::<Option<_>>().ok_or_else(wrong)?),
        Some(word) => match word.as_str() {
            Some("all") => Positions::All,
            Some("prompt") => Positions::Prompt,
            Some("generated") => Positions::Generated,
            _ => return Err(wrong()),
        },
    };
    positions.check().map_err(|e| ApiError::of_field("positions", e))?;
    Ok(positions)
}

/// Reads `layers`: `"all"`, or a list of layer numbers. Absent: none.
pub(super) fn read_layers(model: &TextModel, fields: &mut RequestFields) -> Result<Layers> {
    let wrong = || ApiError::bad_field("layers", "'layers' must be \"all\" or a list of layer numbers");
    let layers = match fields.take("layers") {
        None => Layers::NONE,
        Some(Value::Array(list)) => {
            Layers::Some(list.iter().map(|n| n.as_u64().map(|n| n as usize)).collect::<Option<_>>().ok_or_else(wrong)?)
        }
        Some(word) if word == "all" => Layers::All,
        Some(_) => return Err(wrong()),
    };
    layers.check(model.engine().info().layers).map_err(|e| ApiError::of_field("layers", e))?;
    Ok(layers)
}

/// A vector as a list of numbers, or as base64 of little-endian f32.
fn numbers(name: &str, value: &Value) -> Result<Arc<[f32]>> {
    let wrong = || {
        ApiError::bad_field(
            name,
            format!("'{name}' must be a list of numbers; /v1/vectors also takes base64 of little-endian 32-bit floats"),
        )
    };
    match value {
        Value::Array(list) => {
            list.iter().map(|x| x.as_f64().map(|x| x as f32)).collect::<Option<_>>().ok_or_else(wrong)
        }
        Value::String(text) => {
            let bytes = BASE64_STANDARD.decode(text).map_err(|_| wrong())?;
            let (floats, []) = bytes.as_chunks::<4>() else { return Err(wrong()) };
            Ok(floats.iter().map(|&float| f32::from_le_bytes(float)).collect())
        }
        _ => Err(wrong()),
    }
}

/// `PUT /v1/vectors/{name}`: stores the vector of `{"vector": [..] or base64}`.
pub(super) async fn put(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<String>,
    body: Body,
) -> Result<Json<Value>> {
    let usable = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    if name.len() > MAX_NAME_BYTES || !name.chars().all(usable) {
        let message = format!("A vector's name has at most {MAX_NAME_BYTES} letters, digits, '.', '_' and '-'");
        return Err(ApiError::bad_request(message));
    }
    let read = |model: &TextModel, fields: &mut RequestFields| {
        let vector = fields.take("vector").ok_or_else(|| ApiError::bad_field("vector", "'vector' is missing"))?;
        let vector = numbers("vector", &vector)?;
        check_vector(&vector, model.engine().info().stream_shape()).map_err(|e| ApiError::of_field("vector", e))?;
        Ok(vector)
    };
    let vector = understand(&app, caller.client, body, read).await?;
    let described = describe(&name, &vector);
    app.vectors.put(caller.tenant, name, vector)?;
    Ok(Json(described.into()))
}

/// `GET /v1/vectors`: lists the vectors.
pub(super) async fn list(State(app): State<Arc<App>>, Extension(caller): Extension<Caller>) -> Json<Value> {
    let all = |names: &mut NamedVectors| {
        names.iter().map(|(name, vector)| describe(name, vector).into()).collect::<Vec<Value>>()
    };
    Json(json!({"object": "list", "data": app.vectors.with(caller.tenant, all)}))
}

/// `GET /v1/vectors/{name}`: the vector with its elements.
pub(super) async fn get(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<String>,
) -> Result<Json<Value>> {
    let vector = app.vectors.get(caller.tenant, &name).ok_or_else(|| ApiError::no_such_vector(&name))?;
    let mut described = describe(&name, &vector);
    described.insert("vector".into(), json!(&vector[..]));
    Ok(Json(described.into()))
}

/// `DELETE /v1/vectors/{name}`. Running requests keep the vector.
pub(super) async fn delete(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<String>,
) -> Result<Json<Value>> {
    app.vectors.with(caller.tenant, |names| names.remove(&name)).ok_or_else(|| ApiError::no_such_vector(&name))?;
    Ok(Json(json!({"id": name, "object": "vector", "deleted": true})))
}

fn describe(name: &str, vector: &[f32]) -> Map<String, Value> {
    let norm = vector.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt();
    let vector = json!({"id": name, "object": "vector", "size": vector.len(), "norm": norm});
    vector.as_object().cloned().expect("just written as an object")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_keys_are_many_each_has_fewer_names_and_all_have_some() {
        let vector: Arc<[f32]> = vec![1.0; 8192].into();
        for (keys, share) in [(0, 256), (1, 256), (32, 256), (64, 128), (8192, 1), (100_000, 1)] {
            let vectors = Vectors::of(keys);
            for tenant in [Tenant(1), Tenant(2)] {
                let taken = (0..300).filter(|i| vectors.put(tenant, format!("v{i}"), vector.clone()).is_ok()).count();
                assert_eq!(taken, share, "of {keys} keys");
            }
        }
    }
}
