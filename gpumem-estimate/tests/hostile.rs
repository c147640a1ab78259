//! Configurations with values that make no sense, and headers with random damage: they are read or refused, and nothing else happens.

use std::fs;

use gpumem_estimate::{Dtype, Model, Optimizer, Step, Tensors};
use serde_json::{Value, json};

/// Numbers that are the same in each run.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % end as u64).unwrap()
    }
}

fn hostile(random: &mut Random) -> Value {
    let values = [
        json!(0),
        json!(1),
        json!(2),
        json!(7),
        json!(1_u64 << 20),
        json!(1_u64 << 32),
        json!(1_u64 << 61),
        json!(1_u64 << 63),
        json!(u64::MAX),
        json!(-1),
        json!(0.5),
        json!(1e300),
        json!(null),
        json!("gelu"),
        json!(""),
        json!([]),
        json!([0, 1]),
        json!({}),
        json!(true),
        json!(false),
    ];
    values[random.below(values.len())].clone()
}

/// Replaces a value of an object, or of one inside it.
fn damage(fields: &mut Value, random: &mut Random) {
    let Some(object) = fields.as_object_mut() else { return };
    let keys: Vec<_> =
        object.keys().filter(|key| !["architectures", "_class_name"].contains(&key.as_str())).cloned().collect();
    if keys.is_empty() {
        return;
    }
    let key = &keys[random.below(keys.len())];
    match &mut object[key] {
        inner @ Value::Object(_) if random.below(8) > 0 => damage(inner, random),
        value => *value = hostile(random),
    }
}

#[test]
fn configurations_with_hostile_values_do_no_harm() {
    let lines = include_str!("modules.jsonl").lines().skip(1);
    let all: Vec<Value> = lines.map(|line| serde_json::from_str(line).unwrap()).collect();
    let small = all.iter().filter(|line| line["modules"].is_object());
    let mut random = Random(1);
    let mut counts = [0; 3];
    for line in small {
        for _ in 0..60 {
            let mut config = line["config"].clone();
            for _ in 0..=random.below(3) {
                damage(&mut config, &mut random);
            }
            let length = [1, 16, 16, 1 << 40, u64::MAX][random.below(5)];
            let Ok(model) = Model::from_config(&config.to_string(), length) else {
                counts[0] += 1;
                continue;
            };
            let parameters = model.parameters(Dtype::F32);
            let estimate = Step::training(2, Optimizer::Adam).estimate(&model);
            // What can be estimated can be counted.
            assert!(estimate.is_err() || parameters.is_ok(), "{config}");
            counts[if estimate.is_ok() { 2 } else { 1 }] += 1;
        }
    }
    assert!(counts.iter().all(|count| *count > 100), "{counts:?}");
}

#[test]
fn damaged_safetensors_do_no_harm() {
    let header = r#"{"a":{"dtype":"BF16","shape":[4,2],"data_offsets":[0,16]},"b":{"dtype":"F32","shape":[4],"data_offsets":[16,32]}}"#;
    let mut good = (header.len() as u64).to_le_bytes().to_vec();
    good.extend(header.as_bytes());
    good.resize(good.len() + 32, 0);
    let path = std::env::temp_dir().join(format!("gpumem-estimate-damaged-{}.safetensors", std::process::id()));
    let mut random = Random(7);
    let mut counts = [0; 2];
    for _ in 0..3000 {
        let mut bytes = good.clone();
        for _ in 0..=random.below(2) {
            let at = random.below(8 + header.len());
            let others = b"0123456789-[]{},:.\"\x00\x7f\xff";
            bytes[at] = others[random.below(others.len())];
        }
        fs::write(&path, &bytes).unwrap();
        let result = Tensors::from_safetensors(&path);
        if let Ok(tensors) = &result {
            assert_eq!(tensors.sum().bytes.get(), 32, "the tensors fill the file");
        }
        counts[usize::from(result.is_ok())] += 1;
    }
    fs::remove_file(&path).unwrap();
    assert!(counts[0] > 100 && counts[1] > 10, "{counts:?}");
}
